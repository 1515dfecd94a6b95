"""AdamW on float32 masters, with a learning-rate schedule that is a function of the step number.

Working weights in bfloat16 or float16 are copies of the masters: updates near 1e-6 would round away in them, and so
would the small gradients of one micro-batch beside the sum of many, so gradients are added up in float32 as well. For
float16 the loss is scaled so that small gradients do not vanish (torch's GradScaler). Offloaded, masters and moments
live in CPU memory; gradients then add up in the precision of the weights, and go there once per update.

On several ranks gradients are summed over all of them. Where weights are shared out, a rank's rows are its masters:
torch has summed their gradients already, and AdamW works on these rows alone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner.parallel import ALONE, HALVES, Block, Ranks, own_block, own_part, split_along
from covey.weights.names import is_sharded, working_dtype


def learning_rate(step: int, total_steps: int, config: LearnerConfig) -> float:
    """The rate of optimiser step `step` (from 0): linear warm-up, then constant, cosine or linear decay."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    fall = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fall)


class MasterAdamW:
    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: LearnerConfig,
        total_steps: int,
        *,
        scaler: torch.amp.GradScaler,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.total_steps = total_steps
        self.steps = 0
        self.working = {name: p for name, p in parameters if p.requires_grad}
        assert self.working, "there are no weights to train"
        some = next(iter(self.working.values()))
        self.sharded = is_sharded(some)
        home = torch.device("cpu") if config.offload_optimizer and not self.sharded else some.device
        self.offloaded = home != some.device
        self.shares = some.dtype in (torch.float32, torch.float64) and not self.offloaded
        self.masters: dict[str, Tensor] = (
            {n: own_part(p) for n, p in self.working.items()}
            if self.shares
            else {n: _master(p, home) for n, p in self.working.items()}
        )
        self.adamw = torch.optim.AdamW(
            list(self.masters.values()),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.scaler = scaler  # one for all optimisers that share a backward pass; who owns it updates it
        if some.is_cuda:
            self._take_memory()
        if not self.shares and not self.offloaded:
            for name, p in self.working.items():
                handle = p.register_post_accumulate_grad_hook(_adder(self.masters[name]))
                weakref.finalize(self, handle.remove)  # the model may outlive its optimiser

    def _take_memory(self) -> None:
        """All that the optimiser will ever hold, at once: who measures free memory later sees what is really free."""
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
            if not self.offloaded and not self.sharded:
                master.grad = torch.zeros_like(master)

    def zero_grad(self) -> None:
        for p in (*self.working.values(), *(self.masters.values() if self.sharded else ())):
            p.grad = None
        for master in self.masters.values() if not self.shares else ():
            if master.grad is not None:
                master.grad.zero_()

    def step(self) -> tuple[float, float, bool]:
        """Clip and update. Returns the learning rate, the gradient norm before clipping, and whether the update was
        made: a non-finite gradient leaves weights and optimiser as they were."""
        self._gather_gradients()
        self.scaler.unscale_(self.adamw)
        norm = self._clip()
        rate = learning_rate(self.steps, self.total_steps, self.config)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        made = math.isfinite(norm)
        if made:
            self.scaler.step(self.adamw)
            if not self.shares:
                self._masters_to_working()
            self.steps += 1
        self.zero_grad()
        return rate, norm, made

    def _gather_gradients(self) -> None:
        """The masters' gradients, of all ranks."""
        if self.sharded:
            for name, p in self.working.items():
                grad = None if p.grad is None else own_part(p.grad)
                if grad is not None and getattr(p, "part_of_gradient", False):
                    grad = self.ranks.sum_in_team(grad)
                self.masters[name].grad = grad
            self._share_overflow()
            return
        here = self.working if self.offloaded else self.masters  # on the device
        self.ranks.sum_in_place(p.grad for p in here.values() if p.grad is not None)
        if self.offloaded:
            for name, p in self.working.items():
                self.masters[name].grad = None if p.grad is None else p.grad.to(self.masters[name])

    def _share_overflow(self) -> None:
        """A gradient that is infinite in one rank's rows is so for all: their scalers must go on alike."""
        if not self.scaler.is_enabled():
            return
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        if self.ranks.any(not all(bool(grad.isfinite().all()) for grad in grads)):
            for grad in grads:
                grad.fill_(math.inf)

    def _clip(self) -> float:
        """The norm of all gradients, on all ranks, which are then no longer than the limit."""
        masters, limit = list(self.masters.values()), self.config.grad_clip or math.inf
        if not self.sharded:
            return float(torch.nn.utils.clip_grad_norm_(masters, limit))
        whole = self._own_square(split=False)  # the same on all members of a team
        norm = self.ranks.sum(whole + self.ranks.sum_in_team(self._own_square(split=True))).sqrt()
        torch.nn.utils.clip_grads_with_norm_(masters, limit, norm.to(masters[0].dtype))
        return float(norm)

    def _own_square(self, *, split: bool) -> Tensor:
        """Of the norm of this rank's gradients: of weights that its team has split, or of the others."""
        names = [name for name, p in self.working.items() if (split_along(p) is not None) == split]
        grads = [grad for name in names if (grad := self.masters[name].grad) is not None]
        return torch.nn.utils.get_total_norm(grads).double() ** 2

    @torch.no_grad()
    def _masters_to_working(self) -> None:
        for name, p in self.working.items():
            p.copy_(self.masters[name], non_blocking=True)

    # -- for the checkpoint --------------------------------------------------------------------------------------

    @property
    def _keeps_masters(self) -> bool:
        """Whether the masters say more than the weights in the model's folder."""
        return not self.shares or any(working_dtype(p) in HALVES for p in self.working.values())

    def blocks(self) -> dict[str, Block]:
        """Where weights are shared out: what this rank has of each."""
        return {name: own_block(p, self.ranks) for name, p in self.working.items()} if self.sharded else {}

    def twice(self) -> set[str]:
        """The weights of which the first member of the team has what this rank has."""
        return {name for name, p in self.working.items() if split_along(p) is None} if self.ranks.member else set()

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and masters where they differ from the weights."""
        found: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                found[f"{key}/{name}"] = value
            if self._keeps_masters:
                found[f"master/{name}"] = master
        return found

    def _check(self, tensors: dict[str, Tensor]) -> None:
        """Of these weights, and of their shapes: moments of another model would do no harm that is seen."""
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            master = self.masters.get(name)
            if master is None:
                raise InputError(
                    f"the checkpoint is of another model: it knows a weight {name}, which is not trained here"
                )
            if kind != "step" and tensor.shape != master.shape:
                shapes = f"{list(tensor.shape)} there, {list(master.shape)} here"
                raise InputError(f"the checkpoint is of another model: {name} is {shapes}")

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], steps: int) -> None:
        self._check(tensors)
        for name, master in self.masters.items():
            moments = {k: tensors[f"{k}/{name}"] for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}/{name}" in tensors}
            if moments:
                self.adamw.state[master] = {k: v.to(master.device).clone() for k, v in moments.items()}
            if self._keeps_masters and (kept := tensors.get(f"master/{name}")) is not None:
                master.copy_(kept)  # where they were not kept, the weights are as precise
        self.steps = steps


def _master(weight: nn.Parameter, home: torch.device) -> Tensor:
    """A float32 copy (float64 of float64) where it will live."""
    kept = weight.detach().to(home, torch.promote_types(weight.dtype, torch.float32), copy=True)
    return kept.pin_memory() if weight.is_cuda and home.type == "cpu" else kept


def _adder(master: Tensor) -> Callable[[Tensor], None]:
    """Moves a weight's gradient of one micro-batch into the master's sum."""

    @torch.no_grad()
    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.to(master.dtype)
        else:
            master.grad += weight.grad
        weight.grad = None

    return add

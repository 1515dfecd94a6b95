"""AdamW on float32 master weights, with a learning rate that is a function of the step number.

Half-precision working weights are copies of the masters: updates near 1e-6 would round to nothing in them, and so would
the gradient of one micro-batch next to the sum of many, so gradients are accumulated in float32 too. For float16 the
loss is scaled so that small gradients do not vanish (torch's GradScaler). With `offload_optimizer`, masters and moments
are in CPU memory; gradients then accumulate in the precision of the weights and are copied there once per update.

On several ranks gradients are summed over all of them. If weights are sharded, a rank's shards are its masters: torch
has already summed their gradients, and AdamW runs on these shards alone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from covey.config.schema import LearnerConfig
from covey.errors import InputError
from covey.learner.parallel import HALVES, SINGLE_PROCESS, Block, Ranks, local_block, local_part, tensor_parallel_dim
from covey.models.quantization import require_bitsandbytes
from covey.weights.names import is_sharded, working_dtype

EIGHT_BIT = "adamw8bit"
LARGE = 65_536  # elements of a weight whose gradients a kernel of its own sums
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")  # of torch's and of bitsandbytes'


def check_optimizer(config: LearnerConfig) -> None:
    """Refuse an optimiser that is not installed, or cannot be sharded."""
    if config.optimizer != EIGHT_BIT:
        return
    require_bitsandbytes(f"learner.optimizer={EIGHT_BIT}")
    if config.parallel == "fsdp" or config.tensor_parallel > 1:
        raise InputError(
            f"learner.optimizer={EIGHT_BIT} scales its states in blocks that do not follow the rows of shards\n"
            "  use learner.optimizer=adamw with learner.parallel=fsdp, or learner.parallel=ddp"
        )


def _adamw(masters: list[Tensor], config: LearnerConfig) -> Any:
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == EIGHT_BIT:  # Dettmers et al. 2022, https://arxiv.org/abs/2110.02861
        return require_bitsandbytes(f"learner.optimizer={EIGHT_BIT}").optim.AdamW8bit(masters, **settings)
    return torch.optim.AdamW(masters, fused=True, **settings)


def learning_rate(step: int, total_steps: int, config: LearnerConfig) -> float:
    """The learning rate of optimiser step `step`, from 0: linear warm-up, then constant, cosine or linear decay."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    decay = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay)


class MasterAdamW:
    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: LearnerConfig,
        total_steps: int,
        *,
        scaler: torch.amp.GradScaler,
        ranks: Ranks = SINGLE_PROCESS,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.total_steps = total_steps
        self.steps = 0
        self.working = {name: p for name, p in parameters if p.requires_grad}
        assert self.working, "the model has no trainable weights"
        first = next(iter(self.working.values()))
        self.sharded = is_sharded(first)
        device = torch.device("cpu") if config.offload_optimizer and not self.sharded else first.device
        self.offloaded = device != first.device
        exact = all(p.dtype not in HALVES for p in self.working.values())
        self.masters_are_weights = exact and not self.offloaded
        self.masters: dict[str, Tensor] = (
            {n: local_part(p) for n, p in self.working.items()}
            if self.masters_are_weights
            else {n: _master(p, device) for n, p in self.working.items()}
        )
        self.adamw = _adamw(list(self.masters.values()), config)
        self.scaler = scaler  # shared by all optimisers of one backward pass; the learner updates it
        if first.is_cuda:
            self._allocate_state()
        if not self.masters_are_weights and not self.offloaded:
            for name, p in self.working.items():
                handle = p.register_post_accumulate_grad_hook(_accumulate_into(self.masters[name]))
                weakref.finalize(self, handle.remove)  # the model may outlive this optimiser

    def _allocate_state(self) -> None:
        """Allocate all optimiser state now, so that free memory measured later is really free."""
        for index, master in enumerate(self.masters.values()):
            if self.config.optimizer == EIGHT_BIT:
                self.adamw.init_state(self.adamw.param_groups[0], master, 0, index)
            else:
                self.adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }
            if not self.offloaded and not self.sharded:
                master.grad = torch.zeros_like(master)

    def pending_bytes(self) -> int:
        """Bytes on the weights' device that the first update will allocate: gradients, and moments on a CPU."""
        gradients = sum(p.nbytes for p in self._with_gradients() if p.grad is None)
        moments = [m for m in self.masters.values() if m not in self.adamw.state and not self.offloaded]
        return gradients + self._moment_bytes(moments)

    def state_bytes(self) -> int:
        """Bytes of masters, gradients and moments beside the weights, allocated or not."""
        masters = list(self.masters.values())
        own = 0 if self.masters_are_weights else sum(master.nbytes for master in masters)
        return own + sum(p.nbytes for p in self._with_gradients()) + self._moment_bytes(masters)

    def _with_gradients(self) -> list[Tensor]:
        """The tensors whose gradients are kept until the update."""
        own = self.masters_are_weights or self.offloaded or self.sharded
        return [local_part(p) for p in self.working.values()] if own else list(self.masters.values())

    def _moment_bytes(self, masters: list[Tensor]) -> int:
        return sum(2 * m.numel() * (1 if self.config.optimizer == EIGHT_BIT else m.element_size()) for m in masters)

    def zero_grad(self) -> None:
        for p in (*self.working.values(), *(self.masters.values() if self.sharded else ())):
            p.grad = None
        grads = [] if self.masters_are_weights else [m.grad for m in self.masters.values() if m.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def step(self) -> tuple[float, float, bool]:
        """Clip and update. Returns the learning rate, the gradient norm before clipping, and whether weights were
        updated: with a non-finite gradient, weights and optimiser state stay unchanged."""
        self._gather_gradients()
        self.scaler.unscale_(self.adamw)
        norm = self._clip()
        rate = learning_rate(self.steps, self.total_steps, self.config)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        updated = math.isfinite(norm)
        if updated:
            self.scaler.step(self.adamw)
            if not self.masters_are_weights:
                self._masters_to_working()
            self.steps += 1
        self.zero_grad()
        return rate, norm, updated

    def _gather_gradients(self) -> None:
        """Give the masters their gradients, summed over ranks."""
        if self.sharded:
            for name, p in self.working.items():
                grad = None if p.grad is None else local_part(p.grad)
                if grad is not None and getattr(p, "partial_gradient", False):
                    grad = self.ranks.sum_over_tp(grad)
                self.masters[name].grad = grad
            self._synchronize_overflow()
            return
        on_device = self.working if self.offloaded else self.masters
        self.ranks.sum_in_place(p.grad for p in on_device.values() if p.grad is not None)
        if self.offloaded:
            for name, p in self.working.items():
                self.masters[name].grad = None if p.grad is None else p.grad.to(self.masters[name])

    def _synchronize_overflow(self) -> None:
        """An overflow on one rank becomes one on all, so that their loss scales stay equal."""
        if not self.scaler.is_enabled():
            return
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        if self.ranks.any(not all(bool(grad.isfinite().all()) for grad in grads)):
            for grad in grads:
                grad.fill_(math.inf)

    def _clip(self) -> float:
        """Clip gradients to `grad_clip`. Returns the global norm before clipping."""
        masters, limit = list(self.masters.values()), self.config.grad_clip or math.inf
        if not self.sharded:
            return float(torch.nn.utils.clip_grad_norm_(masters, limit))
        replicated = self._squared_norm(split=False)  # the same on all ranks of a tensor-parallel group
        norm = self.ranks.sum(replicated + self.ranks.sum_over_tp(self._squared_norm(split=True))).sqrt()
        torch.nn.utils.clip_grads_with_norm_(masters, limit, norm.to(masters[0].dtype))
        return float(norm)

    def _squared_norm(self, *, split: bool) -> Tensor:
        """The squared norm of this rank's gradients: with `split`, of weights that tensor parallelism splits, else of
        the others."""
        names = [name for name, p in self.working.items() if (tensor_parallel_dim(p) is not None) == split]
        grads = [grad for name in names if (grad := self.masters[name].grad) is not None]
        return torch.nn.utils.get_total_norm(grads).double() ** 2

    @torch.no_grad()
    def _masters_to_working(self) -> None:
        torch._foreach_copy_(list(self.working.values()), list(self.masters.values()), non_blocking=True)

    # -- Checkpoints -------------------------------------------------------------------------------------------------

    @property
    def _keeps_masters(self) -> bool:
        """Whether the masters are more precise than the weights in the model folder."""
        return not self.masters_are_weights or any(working_dtype(p) in HALVES for p in self.working.values())

    def blocks(self) -> dict[str, Block]:
        """The block of each sharded weight that this rank has."""
        return {name: local_block(p, self.ranks) for name, p in self.working.items()} if self.sharded else {}

    def replicated(self) -> set[str]:
        """The weights that the first rank of the tensor-parallel group has as well, and saves."""
        if self.ranks.tp_rank == 0:
            return set()
        return {name for name, p in self.working.items() if tensor_parallel_dim(p) is None}

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and masters if they differ from the weights."""
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                if not key.startswith("qmap"):  # the same table for all, made again
                    tensors[f"{key}/{name}"] = torch.as_tensor(value)
            if self._keeps_masters:
                tensors[f"master/{name}"] = master
        return tensors

    def _check(self, tensors: dict[str, Tensor]) -> None:
        """Refuse the state of another model, which would train without an error."""
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            master = self.masters.get(name)
            if master is None:
                raise InputError(
                    f"the checkpoint is of another model: it has a weight {name}, which is not trained here"
                )
            if kind in ("exp_avg", "state1") and (kind == "state1") != (self.config.optimizer == EIGHT_BIT):
                raise InputError(
                    f"learner.optimizer={self.config.optimizer}, but the checkpoint has moments of another optimiser\n"
                    f"  continue with learner.optimizer={EIGHT_BIT if kind == 'state1' else 'adamw'}"
                )
            if kind in ("master", "exp_avg", "exp_avg_sq", "state1", "state2") and tensor.shape != master.shape:
                shapes = f"{list(tensor.shape)} there, {list(master.shape)} here"
                raise InputError(f"the checkpoint is of another model: {name} is {shapes}")

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], steps: int) -> None:
        self._check(tensors)
        for index, (name, master) in enumerate(self.masters.items()):
            moments = {key: tensors[f"{key}/{name}"] for key in MOMENTS if f"{key}/{name}" in tensors}
            state = {key: value.to(master.device).clone() for key, value in moments.items()}
            if state and self.config.optimizer == EIGHT_BIT:
                self.adamw.init_state(self.adamw.param_groups[0], master, 0, index)
                self.adamw.state[master] |= state | {"step": int(state["step"])}
            elif state:
                self.adamw.state[master] = state
            if self._keeps_masters and (kept := tensors.get(f"master/{name}")) is not None:
                master.copy_(kept)  # if not saved, the weights are as precise
        self.steps = steps


def _master(weight: nn.Parameter, device: torch.device) -> Tensor:
    """A float32 copy (float64 for float64 weights), pinned if it is in CPU memory for a GPU."""
    kept = weight.detach().to(device, torch.promote_types(weight.dtype, torch.float32), copy=True)
    return kept.pin_memory() if weight.is_cuda and device.type == "cpu" else kept


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a weight's gradient of one micro-batch to the master's."""

    @torch.no_grad()
    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        if master.grad is None:
            master.grad = weight.grad.to(master.dtype)
        elif weight.is_cuda and weight.numel() >= LARGE and weight.grad.is_contiguous():
            from covey.learner.kernels import add_in_place

            add_in_place(master.grad, weight.grad)
        else:
            master.grad += weight.grad
        weight.grad = None

    return add

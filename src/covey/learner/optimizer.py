"""AdamW on float32 masters, with a learning-rate schedule that is a function of the step number.

Working weights in bfloat16 or float16 are copies of the masters: updates near 1e-6 would round away in them. For
float16 the loss is scaled so that small gradients do not vanish (torch's GradScaler).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from covey.config.schema import LearnerConfig


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
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self.working = {name: p for name, p in parameters if p.requires_grad}
        assert self.working, "there are no weights to train"
        some = next(iter(self.working.values()))
        self.shares = some.dtype in (torch.float32, torch.float64)
        self.masters = self.working if self.shares else {n: p.detach().float() for n, p in self.working.items()}
        self.adamw = torch.optim.AdamW(
            list(self.masters.values()),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.scaler = scaler  # one for all optimisers that share a backward pass; who owns it updates it

    def zero_grad(self) -> None:
        for p in self.working.values():
            p.grad = None

    def step(self) -> tuple[float, float, bool]:
        """Clip and update. Returns the learning rate, the gradient norm before clipping, and whether the update was
        made: a non-finite gradient leaves weights and optimiser as they were."""
        self._gradients_to_masters()
        self.scaler.unscale_(self.adamw)
        limit = self.config.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), limit))
        rate = learning_rate(self.steps, self.total_steps, self.config)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        made = math.isfinite(norm)
        if made:
            self.scaler.step(self.adamw)
            self._masters_to_working()
            self.steps += 1
        self.zero_grad()
        return rate, norm, made

    def _gradients_to_masters(self) -> None:
        if not self.shares:
            for name, p in self.working.items():
                self.masters[name].grad = None if p.grad is None else p.grad.float()

    @torch.no_grad()
    def _masters_to_working(self) -> None:
        if not self.shares:
            for name, p in self.working.items():
                p.copy_(self.masters[name])
                self.masters[name].grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Moments, and masters where they differ from the weights: for the checkpoint."""
        found: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                found[f"{key}/{name}"] = value
            if not self.shares:
                found[f"master/{name}"] = master
        return found

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], steps: int) -> None:
        for name, master in self.masters.items():
            moments = {k: tensors[f"{k}/{name}"] for k in ("step", "exp_avg", "exp_avg_sq") if f"{k}/{name}" in tensors}
            if moments:
                self.adamw.state[master] = {k: v.to(master.device).clone() for k, v in moments.items()}
            if not self.shares:
                master.copy_(tensors[f"master/{name}"])
        self.steps = steps

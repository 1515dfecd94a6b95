"""The critic: the expected return before each token, for generalised advantage estimation.

    own backbone      a separate model (a copy of the start model, or critic.model) with a linear head
    shared backbone   a head on the policy's hidden states; critic.shared_coef scales the value gradient in the backbone

The head starts at zero, so the first values are 0. Head and own backbone have their own AdamW (critic.lr).

Shapes: M sampled tokens, D hidden size, R rows, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from covey.algorithms.gae import value_loss
from covey.algorithms.ops import masked_mean, masked_sum
from covey.config.schema import CriticConfig, LearnerConfig
from covey.learner.forward import hidden_states
from covey.learner.optimizer import MasterAdamW
from covey.learner.packing import Packed
from covey.learner.parallel import SINGLE_PROCESS, Ranks
from covey.models.families import causal_lm
from covey.protocols import LossTerm, Metrics, TokenOutputs
from covey.types import Batch


class Critic:
    def __init__(
        self,
        policy: Any,
        config: CriticConfig,
        learner: LearnerConfig,
        *,
        total_updates: int,
        scaler: torch.amp.GradScaler,
        ranks: Ranks = SINGLE_PROCESS,
        backbone: Any = None,
    ) -> None:
        """`backbone` is a separate causal model; None shares the policy's. The critic is never sharded: every rank has
        all of it."""
        self.config = config
        self.backbone = None if backbone is None else causal_lm(backbone).base_model.requires_grad_(True)
        first = next(policy.parameters())
        width = causal_lm(policy if backbone is None else backbone).get_output_embeddings().weight.shape[1]
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.head = nn.Linear(width, 1, device=ranks.device or first.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        common: dict[str, Any] = {"scaler": scaler, "ranks": ranks}
        own = replace(learner, lr=config.lr, grad_clip=config.grad_clip)
        # The head is float32 even with a half-precision backbone, so each has its own optimiser.
        self.optimizers = {"head": MasterAdamW(self.head.named_parameters(), own, total_updates, **common)}
        if self.backbone is not None:
            named = self.backbone.named_parameters()
            self.optimizers["backbone"] = MasterAdamW(named, own, total_updates, **common)
        self.steps = 0  # training steps begun, for the warm-up

    @property
    def shared(self) -> bool:
        return self.backbone is None

    @property
    def warming_up(self) -> bool:
        """Whether only the critic learns: an untrained critic must not guide the policy."""
        return self.steps <= self.config.warmup_steps

    def values(self, packed: Packed, policy_hidden_MD: Tensor | None) -> Tensor:
        """The value before each sampled token, [M]."""
        if self.backbone is not None:
            hidden_MD = hidden_states(self.backbone, packed)
        else:
            assert policy_hidden_MD is not None
            coef = 0.0 if self.warming_up else self.config.shared_coef
            fixed = policy_hidden_MD.detach()
            hidden_MD = fixed + coef * (policy_hidden_MD - fixed)  # scales the backbone's gradient, not the head's
        values: Tensor = self.head(hidden_MD.to(self.head.weight.dtype))[:, 0].clone()  # FSDP outputs must not be views
        return values

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerm:
        assert out.values is not None and batch.values_RT is not None and batch.returns_RT is not None
        returns = batch.returns_RT.to(out.values.dtype)
        each = value_loss(out.values, batch.values_RT.to(out.values.dtype), returns, self.config.clip)
        return LossTerm(masked_sum(each, batch.mask_RT), "tokens")

    @torch.no_grad()
    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        assert out.values is not None and batch.values_RT is not None
        change = (out.values - batch.values_RT).abs()
        clipped = change > self.config.clip if self.config.clip is not None else torch.zeros_like(change)
        return {"value/clipped": masked_mean(clipped.double(), batch.mask_RT)}

    def step(self) -> tuple[Metrics, bool]:
        """Update head and backbone. Returns metrics, and whether all gradients were finite."""
        rates, norms, updated = zip(*(optimizer.step() for optimizer in self.optimizers.values()), strict=True)
        norm = sum(norm**2 for norm in norms) ** 0.5
        return {"value/lr": rates[0], "value/grad_norm": norm}, all(updated)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    # -- Checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Weights under `weight/`, and optimiser state under the optimiser's name."""
        tensors = {f"weight/{name}": tensor for name, tensor in self._weights()}
        for key, optimizer in self.optimizers.items():
            tensors |= {f"{key}/{name}": tensor for name, tensor in optimizer.tensors().items()}
        return tensors

    def counters(self) -> dict[str, Any]:
        return {"steps": self.steps, "updates": {key: o.steps for key, o in self.optimizers.items()}}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], counters: dict[str, Any]) -> None:
        for name, weight in self._weights():
            weight.copy_(tensors[f"weight/{name}"])
        for key, optimizer in self.optimizers.items():
            mine = {n.removeprefix(f"{key}/"): t for n, t in tensors.items() if n.startswith(f"{key}/")}
            optimizer.load(mine, counters["updates"][key])
        self.steps = counters["steps"]

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for key, module in (("head", self.head), ("backbone", self.backbone)):
            if module is not None:
                yield from ((f"{key}.{name}", p.detach()) for name, p in module.named_parameters())

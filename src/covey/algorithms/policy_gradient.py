"""The plain policy gradient: REINFORCE.

Williams 1992, https://doi.org/10.1007/BF00992696

    L_t = −A_t log π_θ(y_t)

It has no ratio, so it is correct only for the policy that sampled: one update per batch.

Deviations: none. Shapes: R rows, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.protocols import Couples, Metrics, TokenOutputs
from covey.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    term: ClassVar[str] = "policy"
    couples: ClassVar[Couples] = "nothing"
    on_policy_only: ClassVar[bool] = True

    def loss(self, out: TokenOutputs, batch: Batch) -> Tensor:
        return -batch.advantages_RT * out.logprobs

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        return {}

"""Maximum likelihood: supervised fine-tuning.

    L_t = −log π_θ(y_t)          summed over the demonstrated tokens, divided by their number in the mini-batch

It is the policy gradient on demonstrations with advantage 1. The catalogue of algorithms does not list it, because it
has no sampling and no reward. `covey sft` trains with it.

Shapes: N demonstrations, R rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from covey.algorithms.ops import masked_sum
from covey.protocols import Advantages, Couples, LossTerm, Metrics, Needs, TokenOutputs
from covey.types import Batch, Samples


@dataclass(frozen=True, slots=True)
class Likelihood:
    name: ClassVar[str] = "sft"
    couples: ClassVar[Couples] = "nothing"
    needs: ClassVar[Needs] = Needs()

    def shape(self, samples: Samples) -> tuple[Samples, Metrics]:
        return samples, {}

    def advantages(self, samples: Samples) -> Advantages:
        return Advantages(torch.ones(samples.episodes))

    def first_pass(self, out: TokenOutputs, batch: Batch) -> Batch:
        return batch

    def loss(self, out: TokenOutputs, batch: Batch) -> dict[str, LossTerm]:
        return {"sft": LossTerm(-masked_sum(out.logprobs, batch.mask_RT), "tokens")}

    def metrics(self, out: TokenOutputs, batch: Batch) -> Metrics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert not state

"""From a loss of each token to one number: by hand, with forked rows and empty answers."""

from __future__ import annotations

import pytest
import torch

from covey.algorithms.aggregation import AGGREGATIONS, Aggregation, GroupSum, divide
from covey.protocols import LossTerm
from tests.algorithms.helpers import NAN, random_batch, same, tensor

# Episode 0 has rows 0 and 2 (3 tokens), episode 1 row 1 (1 token), episode 2 sampled nothing. Masked tokens are NaN.
LOSS = tensor([1, 2, NAN], [10, NAN, NAN], [NAN, 4, NAN], [NAN, NAN, NAN])
EPISODE = torch.tensor([0, 1, 0, 2])
GROUP = torch.tensor([0, 0, 1])


def aggregate(how: Aggregation | GroupSum) -> tuple[LossTerm, float]:
    mask = ~LOSS.isnan()
    zeros = torch.zeros_like(LOSS)
    _, batch = random_batch(
        rows=(),
        group_N=GROUP,
        rewards_N=torch.zeros(3),
        episode_R=EPISODE,
        mask_RT=mask,
        old_logprobs_RT=zeros,
        ref_logprobs_RT=None,
        advantages_RT=zeros,
        max_tokens=5,
    )
    term = how(LOSS, batch)
    return term, float(divide({"it": term}, batch)["it"])


@pytest.mark.parametrize(
    ("how", "unit", "expected"),
    [
        (Aggregation("token-mean"), "tokens", (1 + 2 + 4 + 10) / 4),
        (Aggregation("seq-mean-token-sum"), "episodes", ((1 + 2 + 4) + 10) / 2),
        (Aggregation("seq-mean-token-mean"), "episodes", ((1 + 2 + 4) / 3 + 10) / 2),
        (Aggregation("seq-mean-token-sum-norm", norm_length=8), "episodes", ((1 + 2 + 4) / 8 + 10 / 8) / 2),
        (Aggregation("seq-mean-token-sum-norm"), "episodes", ((1 + 2 + 4) / 5 + 10 / 5) / 2),  # of max_tokens
        (GroupSum(), "groups", 1 + 2 + 4 + 10),  # the group that sampled nothing does not count
    ],
)
def test_by_hand(how: Aggregation | GroupSum, unit: str, expected: float) -> None:
    term, found = aggregate(how)
    assert term.unit == unit
    assert found == pytest.approx(expected)


def test_the_count_is_that_of_the_whole_mini_batch() -> None:
    _, batch = random_batch()
    terms = {unit: LossTerm(torch.tensor(1.0), unit) for unit in ("tokens", "episodes", "groups")}
    for part in (batch, batch.take([0]), batch.take([3, 1])):
        found = divide(terms, part)
        same([found["tokens"], found["episodes"], found["groups"]], [1 / 27, 1 / 7, 1 / 3], 1e-7)


def test_nothing_sampled_is_no_loss() -> None:
    _, batch = random_batch(mask_RT=torch.zeros(9, 5, dtype=torch.bool))
    every: list[Aggregation | GroupSum] = [*map(Aggregation, AGGREGATIONS), GroupSum()]
    for how in every:
        assert float(divide({"it": how(torch.ones(9, 5), batch)}, batch)["it"]) == 0.0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of token-mean, seq-mean-token-sum"):
        Aggregation("mean")
    with pytest.raises(ValueError, match="norm_length must be a whole number from 1"):
        Aggregation("token-mean", norm_length=0)

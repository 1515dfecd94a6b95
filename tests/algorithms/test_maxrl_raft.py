"""MaxRL and RAFT++: numbers by hand, and their expected gradients by enumeration."""

from __future__ import annotations

import pytest
import torch

from covey.algorithms import make
from covey.algorithms.functional import advantages, policy_loss
from tests.algorithms.helpers import F64, all_groups, expected_gradient, same, samples_of, tensor, true_gradient

LOGITS = tensor(0.3, -0.5, 0.9)
SOLVED = tensor(1.0, 0.0, 0.0)  # one of three actions is right


def test_maxrl_divides_by_the_mean() -> None:
    same(advantages("maxrl", tensor(1, 0, 0, 0), [0] * 4), [3, -1, -1, -1])
    same(advantages("maxrl", tensor(1, 1, 1, 0), [0] * 4), [1 / 3, 1 / 3, 1 / 3, -1])
    same(advantages("maxrl", tensor(0.5, 1.5, 0, 0), [0, 0, 1, 1]), [-0.5, 0.5, 0, 0])


def test_maxrl_has_no_signal_where_the_mean_is_not_above_zero() -> None:
    found = make("maxrl").advantages(samples_of([-1.0, 0.5, -1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2]))
    same(found.values, [0, 0, 0, 0, -1, 1])
    assert found.metrics == {"maxrl/negative": pytest.approx(2 / 3)}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_maxrl_climbs_the_series_of_log_p(size: int) -> None:
    """E = Σ_{j<k} (1 − p)^{j−1} ∇p, which is ∇ of −Σ_{j<k} (1 − p)^j / j."""
    action, group = all_groups(3, size)
    found = advantages("maxrl", SOLVED[action], group)
    p = float(torch.softmax(LOGITS, -1)[0])
    series = sum((1 - p) ** (j - 1) for j in range(1, size))
    same(expected_gradient(LOGITS, found, action, group), series * true_gradient(LOGITS, SOLVED))


def test_maxrl_of_large_groups_is_maximum_likelihood() -> None:
    """∇ log p = ∇p / p, up to (1 − p)^{k−1}."""
    p = float(torch.softmax(LOGITS, -1)[0])
    action, group = all_groups(3, 9)
    found = expected_gradient(LOGITS, advantages("maxrl", SOLVED[action], group), action, group)
    same(found, true_gradient(LOGITS, SOLVED) / p * (1 - (1 - p) ** 8), 1e-9)


def test_raft_keeps_the_reward_of_good_answers_alone() -> None:
    same(advantages("raft", tensor(1, 0, -1, 0.5), [0, 0, 0, 1]), [1, 0, 0, 0.5])
    found = make("raft").advantages(samples_of([1.0, 1.0, -2.0, 0.0], [0, 0, 1, 1]))
    assert found.metrics == {"raft/accepted": 0.5}


def test_raft_with_the_policy_gradient_is_fine_tuning_on_the_accepted_answers() -> None:
    """−log π over the tokens of correct answers, divided by the tokens of all."""
    logprobs = torch.log(tensor([0.5, 0.25], [0.1, 0.2], [0.3, 0.6])).requires_grad_()
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    found, _ = policy_loss("policy_gradient", logprobs, logprobs.detach(), tensor(1, 0, 1), mask)
    same(found, -(logprobs[0].sum() + logprobs[2, 0]).detach() / 5)


def test_raft_clips_what_was_imitated_enough() -> None:
    """Ratios 1.5 and ½ of an accepted answer, 9 of a rejected one: −(1.2 + 0.5)/2, averaged over two answers."""
    ratio, mask = tensor([1.5, 0.5], [9.0, 9.0]), torch.ones(2, 2)
    found, _ = policy_loss("raft", ratio.log(), torch.zeros(2, 2, dtype=F64), tensor(1, 0), mask)
    same(found, -0.85 / 2)

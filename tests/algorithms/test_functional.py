"""The algorithms as functions: shapes, labels and types that callers pass, and their mistakes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from covey.algorithms import ALGORITHMS, LOSSES
from covey.algorithms.functional import (
    LOSS_NAMES,
    GVPOLoss,
    advantages,
    compute_gvpo_advantage,
    index_groups,
    policy_loss,
)
from tests.algorithms.helpers import F64, GROUP_ESTIMATORS, NAN, WITHOUT_CRITIC, same, tensor


def test_groups_are_numbered_by_first_appearance() -> None:
    assert index_groups(["b", "a", "b", "c"]).tolist() == [0, 1, 0, 2]
    assert index_groups(torch.tensor([7, 7, 3])).tolist() == [0, 0, 1]
    assert index_groups([("x", 1), ("x", 2), ("x", 1)]).tolist() == [0, 1, 0]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_labels_may_be_anything_in_any_order(name: str) -> None:
    rewards = tensor(1.0, 5.0, 0.0, 2.0, 0.5)
    expected = advantages(name, rewards[[0, 2, 4, 1, 3]], [0, 0, 0, 1, 1])[[0, 3, 1, 4, 2]]
    same(advantages(name, rewards, ["x", "y", "x", "y", "x"]), expected)
    same(advantages(name, rewards, torch.tensor([40, 7, 40, 7, 40])), expected)


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_whole_numbers_are_rewards_too(name: str) -> None:
    rewards = torch.tensor([1, 0, 3, 0])
    options: dict[str, Any] = {"baseline_rewards": torch.ones(4)} if name == "remax" else {}
    options |= {"score_norms": torch.ones(4, 1), "mask": torch.ones(4, 1)} if name == "otb" else {}
    found = advantages(name, rewards, [0, 0, 1, 1], **options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, advantages(name, rewards.float(), [0, 0, 1, 1], **options))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_a_fractional_baseline_is_kept_beside_whole_number_rewards(dtype: torch.dtype) -> None:
    """ReMax: A = R − R(greedy), with the greedy answers' rewards 1/4 and 3/4."""
    rewards = torch.tensor([1, 0, 1, 0]).to(dtype)
    baseline = torch.tensor([0.25, 0.25, 0.75, 0.75])
    found = advantages("remax", rewards, [0, 0, 1, 1], baseline_rewards=baseline)
    assert found.tolist() == [0.75, -0.25, 0.25, -0.75]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_the_precision_is_that_of_the_rewards(name: str) -> None:
    for dtype in (torch.float32, F64):
        assert advantages(name, torch.tensor([1.0, 0.0], dtype=dtype), [0, 0]).dtype == dtype


def test_single_answers_without_signal_give_a_warning() -> None:
    with pytest.warns(UserWarning, match="2 groups have a single answer: rloo learns nothing from them"):
        advantages("rloo", tensor(1, 2, 3, 4), ["a", "b", "c", "c"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advantages("rloo", tensor(1, 2), ["a", "a"])
        advantages("reinforce_plus_plus", tensor(1, 2), ["a", "b"])
        advantages("remax", tensor(1, 2), ["a", "b"], baseline_rewards=tensor(0, 0))


def test_the_reward_of_an_answer_is_on_its_last_sampled_token() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    _, found = advantages("reinforce_plus_plus", tensor(8, 4), [0, 1], mask=mask, gamma=0.5, with_returns=True)
    same(found, [[4, 8, 0], [2, 0, 4]])
    per_token = tensor([0, 8, 99], [0, 99, 4])
    _, same_found = advantages("reinforce_plus_plus", per_token, [0, 1], mask=mask, gamma=0.5, with_returns=True)
    same(same_found, found)


@pytest.mark.parametrize("name", ["gdpo", "dgdo"])
def test_token_rewards_are_not_dropped_by_those_who_read_columns(name: str) -> None:
    """They are summed as elsewhere, or refused; silently they would be advantages of 0."""
    per_token = tensor([1, 2], [0, 1], [0, 0])
    try:
        found = advantages(name, per_token, [0, 0, 0])
    except ValueError:
        return
    same(found, advantages(name, tensor(3, 1, 0), [0, 0, 0]))


def extras(name: str, answers: int) -> dict[str, Any]:
    """What some estimators need beside rewards."""
    rng = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {}
    if name == "ppo":
        options["values"] = torch.rand(answers, 3, generator=rng, dtype=F64)
    if name == "remax":
        options["baseline_rewards"] = torch.ones(answers, dtype=F64)
    if name == "otb":
        options["score_norms"] = torch.rand(answers, 3, generator=rng, dtype=F64)
    return options


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_answer_without_a_reward_is_skipped(name: str) -> None:
    """Its advantage is 0, and the others' are as if it were not there."""
    rewards, groups = tensor(1.0, NAN, 0.0, 3.0, 2.0, NAN), ["a", "a", "a", "b", "b", "b"]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 1], [1, 0, 0], [1, 1, 1], [1, 0, 0]])
    given, options = [0, 2, 3, 4], extras(name, 6)
    found = advantages(name, rewards, groups, mask=mask, **options)
    kept = {key: column[given] for key, column in options.items()}
    same(found[given], advantages(name, rewards[given], "aabb", mask=mask[given], **kept))
    assert not bool(found[[1, 5]].any())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_where_no_answer_was_scored_there_is_no_advantage(name: str) -> None:
    found = advantages(name, tensor(NAN, NAN), [0, 0], mask=torch.ones(2, 3), **extras(name, 2))
    assert not bool(found.any())


def test_token_rewards_outside_the_mask_do_not_count() -> None:
    """NaN there does not make an answer unscored."""
    per_token, mask = tensor([1, NAN], [0, 1], [NAN, 0]), torch.tensor([[1, 0], [1, 1], [0, 1]])
    same(advantages("rloo", per_token, [0, 0, 0], mask=mask), advantages("rloo", tensor(1, 1, 0), [0, 0, 0]))


def test_invalid_arguments_of_advantages() -> None:
    with pytest.raises(ValueError, match=r"rewards have shape \(2,\) but there are 3 group labels"):
        advantages("grpo", tensor(1, 0), [0, 0, 0])
    with pytest.raises(ValueError, match="grpo has no returns"):
        advantages("grpo", tensor(1, 0), [0, 0], with_returns=True)
    with pytest.raises(ValueError, match="unknown algorithm"):
        advantages("nothing", tensor(1, 0), [0, 0])
    with pytest.raises(ValueError, match="unknown setting of grpo  beta"):
        advantages("grpo", tensor(1, 0), [0, 0], beta=0.1)


def test_every_algorithm_and_every_loss_has_its_function() -> None:
    rewards, mask = torch.rand(4, 1, dtype=F64)[:, 0], torch.ones(4, 3)
    for name in ALGORITHMS:
        extra: dict[str, Any] = {"values": torch.rand(4, 3, dtype=F64), "baseline_rewards": rewards}
        extra["score_norms"] = torch.rand(4, 3, dtype=F64)
        found = advantages(name, rewards, [0, 0, 1, 1], mask=mask, **extra)
        assert found.shape in ((4,), (4, 3)) and bool(found.isfinite().all())
    assert set(LOSSES) <= set(LOSS_NAMES)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("grpo", "ppo_clip"), ("vanilla", "ppo_clip"), ("reinforce", "policy_gradient"), ("gpg", "policy_gradient")],
)
def test_other_names_of_losses(typed: str, meant: str) -> None:
    torch.manual_seed(0)
    new, old, advantage, mask = *torch.randn(2, 3, 4, dtype=F64), torch.randn(3, dtype=F64), torch.rand(3, 4) < 0.7
    same(policy_loss(typed, new, old, advantage, mask)[0], policy_loss(meant, new, old, advantage, mask)[0])


ITS_OWN = {"rloo": "policy_gradient", "remax": "policy_gradient", "opo": "policy_gradient", "gdpo": "ppo_clip"}
ITS_OWN |= {"dgdo": "ppo_clip", "grpo_passk": "ppo_clip", "grpo_vectorized": "ppo_clip"}


@pytest.mark.parametrize(("algorithm", "loss"), ITS_OWN.items())
def test_the_name_of_an_algorithm_is_the_loss_that_it_trains_with(algorithm: str, loss: str) -> None:
    torch.manual_seed(0)
    new, old, advantage, mask = *torch.randn(2, 3, 4, dtype=F64), torch.randn(3, dtype=F64), torch.rand(3, 4) < 0.7
    same(policy_loss(algorithm, new, old, advantage, mask)[0], policy_loss(loss, new, old, advantage, mask)[0])


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce++", "ppo", "gae"])
def test_an_algorithm_brings_its_own_aggregation_to_its_loss(name: str) -> None:
    """Answers of 1 and 3 tokens with advantages 1 and 2, ratio 1: REINFORCE++ and PPO average over the four tokens."""
    zeros, mask = torch.zeros(2, 3, dtype=F64), torch.tensor([[1, 0, 0], [1, 1, 1]])
    same(policy_loss(name, zeros, zeros, tensor(1, 2), mask)[0], -7 / 4)


@pytest.mark.parametrize("name", ["grpo", "rloo", "gvpo"])
def test_rewards_may_be_plain_numbers(name: str) -> None:
    groups = ["a", "a", "b", "b", "b"]
    expected = advantages(name, torch.tensor([1.0, 0.0, 2.0, NAN, 0.5]), groups)
    same(advantages(name, [1.0, 0, 2, None, 0.5], groups), expected)
    same(advantages(name, (1.0, 0, 2, NAN, 0.5), groups), expected)


def test_named_rewards_may_be_plain_numbers() -> None:
    named = {"right": [1, 0, 1, 0], "short": [0.5, None, 0.25, 1.0]}
    tensors = {"right": torch.tensor([1.0, 0, 1, 0]), "short": torch.tensor([0.5, NAN, 0.25, 1.0])}
    options: dict[str, Any] = {"weights": {"short": 0.2}}
    same(advantages("gdpo", named, [0, 0, 1, 1], **options), advantages("gdpo", tensors, [0, 0, 1, 1], **options))


def test_one_advantage_per_answer_is_the_same_for_each_of_its_tokens() -> None:
    torch.manual_seed(0)
    new, old, mask = *torch.randn(2, 4, 3, dtype=F64), torch.rand(4, 3) < 0.8
    advantage = torch.randn(4, dtype=F64)
    for name in LOSSES:
        options: dict[str, Any] = {"groups": [0, 0, 1, 1], "ref_logprobs": old}
        per_answer, _ = policy_loss(name, new, old, advantage, mask, **options)
        per_token, _ = policy_loss(name, new, old, advantage[:, None].expand(4, 3), mask, **options)
        same(per_token, per_answer)


def test_invalid_arguments_of_policy_loss() -> None:
    zeros = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"unknown loss  gsop\n  did you mean   gspo"):
        policy_loss("gsop", zeros, zeros, zeros[0], zeros)
    with pytest.raises(ValueError, match=r"grpo needs ref_logprobs= with these settings, or kl_coef=0"):
        policy_loss("grpo", zeros, zeros, zeros[0], zeros, kl_coef=0.1)
    with pytest.raises(ValueError, match="unknown setting of grpo  tau_pos"):
        policy_loss("grpo", zeros, zeros, zeros[0], zeros, tau_pos=1.0)


def test_aggregation_is_an_argument() -> None:
    """Two answers of 1 and 3 tokens with advantages 1 and 2, ratio 1."""
    zeros, mask = torch.zeros(2, 3, dtype=F64), torch.tensor([[1, 0, 0], [1, 1, 1]])
    for how, expected in (("token-mean", -7 / 4), ("seq-mean-token-sum", -7 / 2), ("seq-mean-token-mean", -3 / 2)):
        same(policy_loss("ppo_clip", zeros, zeros, tensor(1, 2), mask, aggregation=how)[0], expected)
    how = "seq-mean-token-sum-norm"
    same(policy_loss("ppo_clip", zeros, zeros, tensor(1, 2), mask, aggregation=how)[0], -7 / 3 / 2)
    same(policy_loss("ppo_clip", zeros, zeros, tensor(1, 2), mask, aggregation=how, norm_length=10)[0], -7 / 10 / 2)


def test_the_three_ways_to_gvpo_agree() -> None:
    """All in one call; advantages and loss apart; and the finished weight in somebody else's −Σ w log π."""
    torch.manual_seed(0)
    logprobs, ref = -torch.rand(2, 6, 4, dtype=F64)
    rewards, mask, groups = torch.randn(6, dtype=F64), torch.rand(6, 4) < 0.8, [0, 1, 0, 1, 0, 1]
    whole = GVPOLoss(beta=0.3)(logprobs, ref, rewards, groups, mask)
    centred = advantages("gvpo", rewards, groups)
    apart, _ = policy_loss("gvpo", logprobs, logprobs, centred, mask, groups=groups, ref_logprobs=ref, beta=0.3)
    weight = compute_gvpo_advantage(rewards, logprobs, ref, groups, mask, beta=0.3)
    finished = -(0.3 / 2) * (weight * (logprobs * mask).sum(-1)).sum() / 2  # k − 1 = 2, two groups
    same(apart, whole)
    same(finished, whole)

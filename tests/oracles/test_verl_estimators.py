"""Advantages against verl's, as its trainer calls them: [N, T], masked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.algorithms.functional import advantages
from tests.oracles.cases import SEEDS, Case, case, side_by_side
from tests.oracles.conftest import Ledger

REASON = "verl is not installed here: make oracles"
core = pytest.importorskip("verl.trainer.ppo.core_algos", reason=REASON)
verl_config = pytest.importorskip("verl.trainer.config", reason=REASON)


def theirs(
    name: str, case: Case, rewards: Tensor | None = None, token_rewards: Tensor | None = None, **more: Any
) -> tuple[Tensor, Tensor]:
    estimator = core.get_adv_estimator_fn(name)
    if name not in ("gae", "reinforce_plus_plus"):
        more["index"] = np.array(case.groups, dtype=object)
    return estimator(
        token_level_rewards=case.on_last_token(rewards) if token_rewards is None else token_rewards.clone(),
        response_mask=case.mask.long(),
        **more,
    )


def ours(name: str, case: Case, rewards: Tensor | None = None, **more: Any) -> Tensor:
    rewards = case.rewards if rewards is None else rewards
    found = advantages(name, rewards, case.groups, mask=case.mask, **more)
    return (found[:, None] if found.dim() == 1 else found) * case.mask


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("epsilon", [1e-6, 0.05])
@pytest.mark.parametrize("std", [True, False])
def test_grpo(ledger: Ledger, seed: int, holes: bool, epsilon: float, std: bool) -> None:
    step = case(seed, holes=holes)
    expected, _ = theirs("grpo", step, norm_adv_by_std_in_grpo=std, epsilon=epsilon)
    found = ours("grpo", step, std_normalize=std, epsilon=epsilon)
    ledger.same("grpo", "verl grpo" if std else "verl grpo without std", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("std", [True, False])
def test_grpo_vectorized(ledger: Ledger, seed: int, std: bool) -> None:
    """verl's second implementation works in float32: rewards that float32 holds exactly."""
    step = case(seed)
    rewards = (step.rewards * 8).round() / 8
    expected, _ = theirs("grpo_vectorized", step, rewards, norm_adv_by_std_in_grpo=std)
    found = ours("grpo", step, rewards, std_normalize=std)
    ledger.same("grpo", "verl grpo_vectorized" if std else "verl grpo_vectorized without std", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_dr_grpo_has_no_standard_deviation(ledger: Ledger, seed: int) -> None:
    step = case(seed)
    expected, _ = theirs("grpo", step, norm_adv_by_std_in_grpo=False)
    ledger.same("dr_grpo", "verl grpo without std", ours("dr_grpo", step), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 0.5)])
def test_gae(ledger: Ledger, seed: int, holes: bool, gamma: float, lam: float) -> None:
    """Rewards on every token. Only sampled tokens are compared: verl leaves unused values beyond the mask."""
    step = case(seed, holes=holes)
    rewards = 0.1 * step.advantages + step.on_last_token()
    expected, returns = theirs("gae", step, token_rewards=rewards, values=step.values, gamma=gamma, lam=lam)
    settings = {"values": step.values, "gamma": gamma, "lam": lam, "with_returns": True, "mask": step.mask}
    found, own_returns = advantages("ppo", rewards, step.groups, **settings)
    ledger.same("ppo (gae), advantages", "verl gae", found[step.mask], expected[step.mask])
    ledger.same("ppo (gae), returns", "verl gae", own_returns[step.mask], returns[step.mask])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(ledger: Ledger, seed: int, holes: bool, gamma: float) -> None:
    step = case(seed, holes=holes, sizes=[1, 2, 3, 4])
    rewards = 0.1 * step.advantages + step.on_last_token()
    config = verl_config.AlgoConfig(gamma=gamma)
    expected, returns = theirs("reinforce_plus_plus", step, token_rewards=rewards, config=config)
    settings = {"mask": step.mask, "gamma": gamma, "with_returns": True}
    found, own_returns = advantages("reinforce_plus_plus", rewards, step.groups, **settings)
    ledger.same("reinforce_plus_plus, advantages", "verl reinforce_plus_plus", found, expected)
    ledger.same("reinforce_plus_plus, returns", "verl reinforce_plus_plus", own_returns, returns)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_single_reward_sits_on_the_last_sampled_token(ledger: Ledger, seed: int) -> None:
    step = case(seed, holes=True)
    expected, _ = theirs("reinforce_plus_plus", step, config=verl_config.AlgoConfig(gamma=0.95))
    found = ours("reinforce_plus_plus", step, gamma=0.95)
    ledger.same("reinforce_plus_plus, advantages", "verl reinforce_plus_plus", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
        ("rloo", "rloo"),
        ("rloo", "rloo_vectorized"),
        ("opo", "opo"),
        ("gpg", "gpg"),
    ],
)
def test_group_baselines(ledger: Ledger, seed: int, holes: bool, name: str, other: str) -> None:
    step = case(seed, holes=holes)
    expected, _ = theirs(other, step)
    ledger.same(name, f"verl {other}", ours(name, step), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_gpg_counts_answers_without_reward(ledger: Ledger, seed: int) -> None:
    step = case(seed)
    rewards = (step.rewards > 0.5).double()
    expected, _ = theirs("gpg", step, rewards)
    ledger.same("gpg", "verl gpg", ours("gpg", step, rewards), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("std", [True, False])
def test_grpo_passk(ledger: Ledger, seed: int, std: bool) -> None:
    step = side_by_side(case(seed))
    expected, _ = theirs("grpo_passk", step, config=verl_config.AlgoConfig(norm_adv_by_std_in_grpo=std))
    ledger.same("grpo_passk", "verl grpo_passk", ours("grpo_passk", step, std_normalize=std), expected)


def test_grpo_passk_with_groups_mixed() -> None:
    """Two groups, though the last answer belongs to the first."""
    rewards = torch.tensor([1.0, 0.5, 3.0, 2.5], dtype=torch.float64)
    found = advantages("grpo_passk", rewards, ["a", "b", "b", "a"], std_normalize=False)
    assert found.tolist() == [0.0, 0.0, 2.5, 1.5]


@pytest.mark.parametrize("seed", SEEDS)
def test_remax(ledger: Ledger, seed: int) -> None:
    step = case(seed)
    of_prompt = {label: 0.3 * number for number, label in enumerate(sorted(set(step.groups)))}
    greedy = torch.tensor([of_prompt[label] for label in step.groups], dtype=torch.float64)
    expected, _ = theirs("remax", step, reward_baselines=greedy)
    ledger.same("remax", "verl remax", ours("remax", step, baseline_rewards=greedy), expected)


# Where they differ.


def small(groups: list[str], rewards: list[float], lengths: list[int]) -> Case:
    """A step by hand."""
    length = max(lengths)
    empty = torch.zeros(len(groups), length, dtype=torch.float64)
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    return Case(groups, torch.tensor(rewards, dtype=torch.float64), mask, *[empty] * 5)


@pytest.mark.filterwarnings("ignore:.*have a single answer")
@pytest.mark.parametrize(
    ("name", "other", "alone"),
    [("grpo", "grpo", 3 / (1 + 1e-6)), ("rloo", "rloo", 3.0), ("opo", "opo", 3.0), ("gpg", "gpg", 3 * 3 / 2)],
)
def test_a_group_of_one(ledger: Ledger, name: str, other: str, alone: float) -> None:
    """An answer without siblings has no baseline. verl hands its raw reward on as the advantage, so that the size of
    the reward, not its being better than others, is learned from; Covey learns nothing from it, and says so."""
    step = small(["a", "a", "b"], [1.0, 0.0, 3.0], [1, 1, 1])
    expected, _ = theirs(other, step)
    found = ours(name, step)
    assert float(found[2]) == 0
    assert float(expected[2]) == pytest.approx(alone)
    ledger.same(name, f"verl {other}", found[:2], expected[:2])
    ledger.differs(f"{name}, a group of one", f"verl {other}", found[2], expected[2], because=LONELY)


LONELY = "a single answer has no baseline: Covey gives it advantage 0, verl the raw reward"


@pytest.mark.filterwarnings("ignore:.*have a single answer")
def test_a_group_of_one_in_the_vectorized_rloo(ledger: Ledger) -> None:
    """verl's second RLOO gives 0, as Covey does."""
    step = small(["a", "a", "b"], [1.0, 0.0, 3.0], [1, 1, 1])
    ledger.same("rloo", "verl rloo_vectorized", ours("rloo", step), theirs("rloo_vectorized", step)[0])


@pytest.mark.filterwarnings("ignore:.*have a single answer")
def test_a_group_of_one_with_the_batch_whitened(ledger: Ledger) -> None:
    """Before the whitening: ours 1/2, −1/2, 0 and theirs 1/2, −1/2, 3."""
    step = small(["a", "a", "b"], [1.0, 0.0, 3.0], [1, 1, 1])
    found, (expected, _) = ours("reinforce_plus_plus_baseline", step), theirs("reinforce_plus_plus_baseline", step)
    assert found[:, 0].tolist() == pytest.approx([1, -1, 0])  # σ = 1/2
    raw = torch.tensor([0.5, -0.5, 3.0], dtype=torch.float64)
    assert expected[:, 0].tolist() == pytest.approx(((raw - raw.mean()) / raw.std()).tolist())
    oracle = "verl reinforce_plus_plus_baseline"
    ledger.differs("reinforce_plus_plus_baseline, a group of one", oracle, found, expected, because=LONELY)


@pytest.mark.filterwarnings("ignore:.*have a single answer")
def test_a_group_of_one_for_pass_at_k(ledger: Ledger) -> None:
    """verl stops the run; Covey gives 0 and warns."""
    step = small(["a", "a", "b"], [1.0, 0.0, 3.0], [1, 1, 1])
    with pytest.raises(ValueError, match="at least 2"):
        theirs("grpo_passk", step, config=verl_config.AlgoConfig())
    assert float(ours("grpo_passk", step)[2]) == 0
    because = "verl raises an error, Covey gives 0 and warns"
    ledger.differs("grpo_passk, a group of one", "verl grpo_passk", 0.0, None, because=because)


def test_equal_rewards_have_no_signal_in_float32(ledger: Ledger) -> None:
    """The mean of equal float32 numbers is off by a rounding error, which a standard deviation of mere rounding blows
    up: seven answers with 0.1 each get an advantage from verl. Covey takes such a spread as none."""
    rewards = torch.full((7,), 0.1)
    mask = torch.ones(7, 1, dtype=torch.long)
    expected, _ = core.compute_grpo_outcome_advantage(rewards[:, None], mask, np.array(["a"] * 7, dtype=object))
    found = advantages("grpo", rewards, ["a"] * 7)
    assert found.tolist() == [0.0] * 7
    assert expected[:, 0].abs().tolist() == pytest.approx([0.0074] * 7, abs=2e-4)
    because = "equal rewards: a spread within rounding error counts as zero; verl divides rounding errors by each other"
    ledger.differs("grpo, equal float32 rewards of 0.1", "verl grpo", found, expected[:, 0], because=because)


def test_equal_returns_have_no_signal_in_float32(ledger: Ledger) -> None:
    """The same for what is whitened over the batch."""
    rewards = torch.full((7, 1), 0.1)
    mask = torch.ones(7, 1, dtype=torch.long)
    config = verl_config.AlgoConfig()
    expected, _ = core.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
    found = advantages("reinforce_plus_plus", rewards, ["a"] * 7, mask=mask)
    assert found.tolist() == [[0.0]] * 7
    assert 0 < float(expected.abs().max()) < 1e-3
    because = "equal returns: a spread within rounding error counts as zero; verl whitens the rounding errors"
    thing, oracle = "reinforce_plus_plus, equal float32 returns", "verl reinforce_plus_plus"
    ledger.differs(thing, oracle, found, expected, because=because)


def test_a_step_of_one_token(ledger: Ledger) -> None:
    """There is nothing to whiten: verl stops the run, Covey gives 0."""
    step = small(["a"], [2.0], [1])
    with pytest.raises(ValueError, match="sum of the mask is one"):
        theirs("reinforce_plus_plus", step, config=verl_config.AlgoConfig())
    assert ours("reinforce_plus_plus", step).tolist() == [[0.0]]
    because = "nothing to whiten: verl raises an error, Covey gives 0"
    ledger.differs("reinforce_plus_plus, one token", "verl reinforce_plus_plus", 0.0, None, because=because)


@pytest.mark.parametrize(("name", "other"), [("grpo", "grpo"), ("rloo", "rloo"), ("opo", "opo"), ("gpg", "gpg")])
def test_a_missing_reward(ledger: Ledger, name: str, other: str) -> None:
    """NaN spreads over the group in verl. In Covey an answer without a reward is skipped, with advantage 0."""
    step = small(["a", "a", "a", "b", "b"], [1.0, math.nan, 0.5, 1.0, 0.0], [1] * 5)
    expected, _ = theirs(other, step)
    assert expected[:3].isnan().all()
    found = ours(name, step)
    without = small(["a", "a", "b", "b"], [1.0, 0.5, 1.0, 0.0], [1] * 4)
    assert found[[0, 2, 3, 4]].tolist() == ours(name, without).tolist()
    assert float(found[1].abs().max()) == 0
    because = "excluded from the group, with advantage 0; in verl NaN spreads over the group"
    ledger.differs(f"{name}, a missing reward", f"verl {other}", found, expected, because=because)


def test_gdpo_whitens_over_answers_not_tokens(ledger: Ledger) -> None:
    """One group with rewards 1, 0 and answers of 1 and 3 tokens; one group without signal and answers of 2 tokens.

    With A = (x, −x, 0, 0) after the group step, over answers: mean 0, variance 2x²/3: ±√(3/2), and 0 where there was no
    signal. Over tokens the long answer moves the mean to −x/4, variance x²/2, and the group without signal gets
    the advantage 1/(4√½) = 0.354."""
    step = small(["a", "a", "b", "b"], [1.0, 0.0, 0.5, 0.5], [1, 3, 2, 2])
    found, expected = ours("gdpo", step)[:, 0], theirs("gdpo", step)[0][:, 0]
    assert found.tolist() == pytest.approx([math.sqrt(1.5), -math.sqrt(1.5), 0, 0], abs=1e-5)
    assert expected.tolist() == pytest.approx([1.25 * math.sqrt(2), -0.75 * math.sqrt(2), 0.35355, 0.35355], abs=1e-5)
    because = "the last step normalises over answers: over tokens, a group without signal gets an advantage"
    ledger.differs("gdpo", "verl gdpo", found, expected, because=because)


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_agrees_before_the_last_step(ledger: Ledger, seed: int) -> None:
    """Both are the weighted sum of the group-normalised rewards, shifted and scaled for the whole step: the shift and
    scale from one answer to another undone, they are equal. verl reads several rewards in float32, so these are
    numbers that float32 holds."""
    step = case(seed)
    columns = {"correct": (step.rewards > 0).double(), "length": (step.values[:, 0] * 4).round() / 4}
    weights = {"correct": 1.0, "length": 0.5}
    config = verl_config.AlgoConfig(gdpo_reward_keys=list(columns), gdpo_reward_weights=list(weights.values()))
    batch = {"prompts": torch.zeros(len(step.groups), 1), "attention_mask": torch.cat([step.mask[:, :1], step.mask], 1)}
    named = {name: column.numpy() for name, column in columns.items()}
    expected, _ = theirs("gdpo", step, config=config, non_tensor_batch=named, batch=batch)
    found = advantages("gdpo", columns, step.groups, weights=weights)
    scaled, other = _standard(found), _standard(expected[:, 0].double())
    ledger.same("gdpo, up to shift and scale of the step", "verl gdpo", scaled, other)


def _standard(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()


def test_remax_with_token_rewards(ledger: Ledger) -> None:
    """Rewards 1 on the first token and 2 on the last, greedy reward 0.5. The paper's advantage is of the whole answer:
    3 − 0.5 for both tokens. verl credits a token with what came after it, 3 and 2, less the greedy reward of the whole
    answer: 2.5 and 1.5."""
    rewards, groups = torch.tensor([[1.0, 2.0]], dtype=torch.float64), ["a"]
    greedy, mask = torch.tensor([0.5], dtype=torch.float64), torch.ones(1, 2, dtype=torch.long)
    expected, _ = core.compute_remax_outcome_advantage(rewards, greedy, mask)
    found = advantages("remax", rewards, groups, mask=mask, baseline_rewards=greedy)[:, None] * mask
    assert found.tolist() == [[2.5, 2.5]]
    assert expected.tolist() == [[2.5, 1.5]]
    because = "one advantage for the whole answer, as in the paper; verl uses the reward-to-go"
    ledger.differs("remax, rewards on single tokens", "verl remax", found, expected, because=because)


def test_a_reward_on_a_token_that_was_not_sampled(ledger: Ledger) -> None:
    """Covey reads token rewards through the mask; verl's group estimators sum over the whole row."""
    step = small(["a", "a"], [0.0, 0.0], [2, 1])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 4.0]], dtype=torch.float64)  # the second row's 4 lies beyond its end
    expected, _ = theirs("rloo", step, token_rewards=rewards)
    found = advantages("rloo", rewards, step.groups, mask=step.mask)[:, None] * step.mask
    assert found[:, 0].tolist() == [1.0, -1.0]
    assert expected[:, 0].tolist() == [-3.0, 3.0]
    because = "token rewards are read through the mask; verl sums the whole row"
    ledger.differs("rloo, a reward beyond the mask", "verl rloo", found, expected, because=because)


# The optimal token baseline.


def with_norms(step: Case, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """verl's advantages and Covey's, for random Σ π² that are possible beside π."""
    random = torch.Generator().manual_seed(7)
    pi = step.logprobs.exp()
    squares = pi**2 + (1 - pi) ** 2 * torch.rand(pi.shape, generator=random, dtype=torch.float64)
    name = "tir_optimal_token_baseline" if bool((~step.mask).any()) else "optimal_token_baseline"
    columns = {"old_log_probs": step.logprobs, "sum_pi_squared": squares, "epsilon": 1e-30}
    expected, _ = theirs(name, step, rewards, **columns)
    return expected, ours("otb", step, rewards, score_norms=1 - 2 * pi + squares)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("holes", [False, True])
def test_otb(ledger: Ledger, seed: int, holes: bool) -> None:
    """Of rewards that differ in every group; positions are those of sampled tokens, as in verl's variant for tools."""
    step = case(seed, holes=holes)
    rewards = step.rewards + 0.01 * torch.arange(len(step.rewards))
    expected, found = with_norms(step, rewards)
    ledger.same("otb", "verl tir_optimal_token_baseline", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_otb_of_full_answers(ledger: Ledger, seed: int) -> None:
    step = case(seed)
    step = Case(**(vars(step) | {"mask": torch.ones_like(step.mask)}))
    expected, found = with_norms(step, step.rewards + 0.01 * torch.arange(len(step.rewards)))
    ledger.same("otb", "verl optimal_token_baseline", found, expected)


def test_otb_of_equal_rewards(ledger: Ledger) -> None:
    """Two answers of reward 1, one longer: verl rewards its tail, where it has no baseline."""
    mask = torch.tensor([[True, True], [True, False]])
    step = Case(**(vars(case(0)) | {"mask": mask, "groups": ["a", "a"], "logprobs": torch.full((2, 2), -1.0).double()}))
    expected, found = with_norms(step, torch.ones(2, dtype=torch.float64))
    assert float(expected[0, 1]) == 1.0 and not found.any()
    because = "a group of equal rewards has no signal; verl gives the end of its longest answer the full reward"
    ledger.differs("otb, equal rewards", "verl tir_optimal_token_baseline", found, expected, because=because)

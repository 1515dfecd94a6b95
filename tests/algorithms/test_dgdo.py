"""DGDO: its warm-up is GDPO, its instability by hand, how its weights move, and that they keep their floor."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms import make
from covey.algorithms.dgdo import Dgdo
from covey.algorithms.functional import advantages
from covey.algorithms.gdpo import combined
from covey.types import Samples, Unfiltered
from tests.algorithms.helpers import F64, NAN, same, samples_of, tensor

GROUPS = [0, 0, 0, 1, 1, 1]


def random_step(seed: int, names: str = "ab", weights: Mapping[str, float] | None = None) -> Samples:
    """Rewards of ever different mean and spread, some of them not given."""
    rng = torch.Generator().manual_seed(seed)
    rewards = {}
    for name in names:
        scale, origin = torch.rand(2, generator=rng, dtype=F64) * 3
        column = origin + scale * torch.randn(6, generator=rng, dtype=F64)
        rewards[name] = column.masked_fill(torch.rand(6, generator=rng) < 0.1, NAN)
    return samples_of(rewards, GROUPS, weights=weights)


def softmax(values: Mapping[str, float]) -> dict[str, float]:
    total = sum(math.exp(v) for v in values.values())
    return {name: math.exp(v) / total for name, v in values.items()}


def moved(dgdo: Dgdo, samples: Samples) -> dict[str, float]:
    """The weights after one step, and that they are what the metrics tell if no floor holds them."""
    found = dgdo.advantages(samples).metrics
    assert dgdo.min_weight > 0 or all(found[f"dgdo/{n}/weight"] == pytest.approx(w) for n, w in dgdo.weights.items())
    return dict(dgdo.weights)


# Warm-up.


def test_in_warm_up_it_is_gdpo_bit_for_bit() -> None:
    dgdo, gdpo = make("dgdo", warmup_steps=5), make("gdpo")
    for step in range(6):
        samples = random_step(step, "abc", {"a": 0.3, "c": 2.0})
        found, expected = dgdo.advantages(samples), gdpo.advantages(samples)
        assert torch.equal(found.values, expected.values) == (step < 5)
        assert found.metrics["dgdo/in_warmup"] == float(step < 5)
        assert found.metrics.items() >= expected.metrics.items()


def test_weights_do_not_move_in_warm_up() -> None:
    dgdo = Dgdo(warmup_steps=3)
    for step in range(3):
        metrics = dgdo.advantages(random_step(step)).metrics
        assert dgdo.weights == {"a": 0.5, "b": 0.5}
        assert metrics["dgdo/weight_entropy"] == pytest.approx(math.log(2))
    dgdo.advantages(random_step(3))
    assert dgdo.weights != {"a": 0.5, "b": 0.5}


# Instability.


def test_instability_by_hand() -> None:
    """Groups (1, 3) and (5, 7, 9): means 2 and 7, μ = 4.5; population variances 1 and 8/3, so 11/6 within, and 6.25 of
    the means. Every group counts once, whatever its size."""
    found = Dgdo().instability(tensor(1, 3, 5, 7, 9), torch.tensor([0, 0, 1, 1, 1]))
    sigma = math.sqrt(11 / 6 + 6.25 + 1e-8)
    assert found == pytest.approx({"mu": 4.5, "sigma": sigma, "instability": sigma / (4.5 + 1e-6)}, rel=1e-12)


def test_instability_uses_the_size_of_the_mean_and_epsilon() -> None:
    found = Dgdo(epsilon=0.5).instability(tensor(-1, -3), torch.tensor([0, 0]))
    assert found["instability"] == pytest.approx(math.sqrt(1 + 1e-8) / 2.5, rel=1e-12)


def test_missing_rewards_do_not_count() -> None:
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    found = Dgdo().instability(tensor(1, NAN, 3, 5, NAN, NAN), group)
    assert found == Dgdo().instability(tensor(1, 3, 5), torch.tensor([0, 0, 1]))
    later = Dgdo().instability(tensor(NAN, NAN, NAN, 1, 3, 5), torch.tensor([0, 0, 1, 2, 2, 3]))
    assert later == found  # whole groups are missing
    assert Dgdo().instability(tensor(NAN), torch.tensor([0])) == {"mu": 0.0, "sigma": 0.0, "instability": 0.0}


@pytest.mark.parametrize("value", [0.1, 0.0, -1e6])
def test_a_reward_that_never_varies_is_not_unstable(value: float) -> None:
    group = torch.tensor([0] * 7 + [1] * 3)
    column = torch.full((10,), value, dtype=F64)
    assert Dgdo().instability(column, group)["instability"] == 0.0
    exact = Dgdo(paper_exact=True).instability(column, group)["instability"]
    assert exact == pytest.approx(1e-4 / (abs(value) + 1e-6), rel=1e-6)


def test_instability_is_capped_unless_the_paper_is_followed() -> None:
    column, group = tensor(1, -1), torch.tensor([0, 0])  # σ = 1, μ = 0
    assert Dgdo().instability(column, group)["instability"] == 10.0
    assert Dgdo(max_instability=3.0).instability(column, group)["instability"] == 3.0
    assert Dgdo(paper_exact=True).instability(column, group)["instability"] == pytest.approx(1e6)


def test_statistics_are_those_before_groups_were_filtered() -> None:
    """The replaced zero-variance groups count in the instability, and only there."""
    unfiltered = Unfiltered(
        group_N=torch.tensor([0, 0, 1, 1, 1]),
        rewards={"a": tensor(1, 3, 5, 5, 5), "b": tensor(0, 2, 1, 1, 1)},
        longest_N=torch.ones(5),
        truncated_N=torch.zeros(5, dtype=torch.bool),
    )
    samples = samples_of({"a": [1, 3], "b": [0, 2]}, [0, 0], unfiltered=unfiltered)
    dgdo = Dgdo(warmup_steps=0, beta_start=0.0)
    metrics = dgdo.advantages(samples).metrics
    # a: means 2 and 5, μ = 3.5, variances ½ within and 2.25 of the means
    assert metrics["dgdo/a/mu"] == pytest.approx(3.5)
    assert metrics["dgdo/a/sigma"] == pytest.approx(math.sqrt(0.5 + 2.25 + 1e-8))
    assert metrics["dgdo/b/mu"] == 1.0
    assert dgdo.weights == pytest.approx(softmax({n: metrics[f"dgdo/{n}/instability"] for n in "ab"}))
    assert metrics["gdpo/a/mean"] == 2.0


# Weights.


def test_weights_follow_the_softmax_of_the_instability() -> None:
    """a: 1, 3 with μ = 2, σ = 1, D = ½;  b: 1, 1, so D = 0. β = 0 forgets the old weights at once."""
    samples = samples_of({"a": [1.0, 3.0], "b": [1.0, 1.0]}, [0, 0])
    plain: dict[str, Any] = {"warmup_steps": 0, "beta_start": 0.0, "min_weight": 0.0}
    rise = math.exp(0.5)
    same(list(moved(Dgdo(**plain), samples).values()), [rise / (rise + 1), 1 / (rise + 1)], 1e-6)
    same(list(moved(Dgdo(**plain, invert=True), samples).values()), [1 / (rise + 1), rise / (rise + 1)], 1e-6)
    priors = {"b": 3.0}
    same(
        list(moved(Dgdo(**plain, importance_priors=priors), samples).values()),
        [rise / (rise + 3), 3 / (rise + 3)],
        1e-6,
    )


def test_the_prior_of_a_reward_that_never_varies_may_be_zero() -> None:
    """a: μ = 0 and σ = 1e-4, so D = 1e4: the softmax of b rounds to 0, but b is the only reward with a prior."""
    samples = samples_of({"a": [0.0, 0.0], "b": [1.0, 3.0]}, [0, 0])
    plain: dict[str, Any] = {"warmup_steps": 0, "beta_start": 0.0, "min_weight": 0.0, "epsilon": 1e-8}
    assert moved(Dgdo(**plain, paper_exact=True, importance_priors={"a": 0.0}), samples) == {"a": 0.0, "b": 1.0}


def test_weights_are_averaged_over_steps_before_the_floor_is_applied() -> None:
    """w ← β w + (1 − β) target, from uniform: by hand over three steps, with a floor that `b` stays at."""
    dgdo = Dgdo(warmup_steps=0, beta=0.5, beta_start=0.5, min_weight=0.45)
    samples = samples_of({"a": [0.0, 4.0], "b": [1.0, 1.0]}, [0, 0])  # D = 1 and 0
    target = math.e / (math.e + 1)
    weight = 0.5
    for _ in range(3):
        metrics = dgdo.advantages(samples).metrics
        weight = 0.5 * weight + 0.5 * target
        same(list(dgdo.weights.values()), [weight, 1 - weight], 1e-6)
        assert metrics["dgdo/a/weight"] == pytest.approx(0.55)
        assert metrics["dgdo/b/weight"] == pytest.approx(0.45)
        assert metrics["dgdo/weight_entropy"] == pytest.approx(-0.55 * math.log(0.55) - 0.45 * math.log(0.45))


def test_beta_rises_linearly_after_the_warm_up() -> None:
    dgdo = Dgdo(warmup_steps=2, beta_start=0.5, beta=0.9, beta_warmup_steps=4)
    found = [dgdo.advantages(random_step(step)).metrics["dgdo/effective_beta"] for step in range(9)]
    assert found == pytest.approx([0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9])
    assert Dgdo(beta=0.8, beta_warmup_steps=0, warmup_steps=0).effective_beta() == pytest.approx(0.8)


def test_the_beta_of_the_step_is_the_one_that_is_used() -> None:
    dgdo = Dgdo(warmup_steps=0, beta_start=0.0, beta=1.0, beta_warmup_steps=2, min_weight=0.0)
    for step, beta in enumerate([0.0, 0.5, 1.0]):
        before = dict(dgdo.weights) or {"a": 0.5, "b": 0.5}
        metrics = dgdo.advantages(random_step(step)).metrics
        target = softmax({n: metrics[f"dgdo/{n}/instability"] for n in "ab"})
        assert dgdo.weights == pytest.approx({n: beta * before[n] + (1 - beta) * target[n] for n in "ab"})


def test_the_advantage_is_gdpos_with_the_weights_of_the_step() -> None:
    """K·w times the reward's own weight, so that uniform weights are GDPO's."""
    samples = random_step(7, "abc", {"a": 0.3, "c": 2.0})
    dgdo = Dgdo(warmup_steps=0, min_weight=0.2)
    found = dgdo.advantages(samples)
    used = {name: found.metrics[f"dgdo/{name}/weight"] for name in "abc"}
    scaled = {name: 3 * used[name] * samples.weights[name] for name in "abc"}
    same(found.values, combined(samples, scaled, 1e-6))
    assert found.metrics["gdpo/a/mean"] == pytest.approx(float(samples.rewards["a"].nanmean()))


def test_a_reward_of_weight_zero_is_ignored() -> None:
    with_idle = Dgdo(warmup_steps=0)
    samples = samples_of({"a": [1, 3], "idle": [5, 9], "b": [0, 2]}, [0, 0], weights={"idle": 0.0})
    found = with_idle.advantages(samples)
    assert set(with_idle.weights) == {"a", "b"} and "dgdo/idle/weight" not in found.metrics
    assert found.metrics["gdpo/idle/mean"] == 7.0
    same(found.values, Dgdo(warmup_steps=0).advantages(samples_of({"a": [1, 3], "b": [0, 2]}, [0, 0])).values)


@pytest.mark.parametrize("paper_exact", [False, True])
def test_the_floor_holds_and_weights_sum_to_one(paper_exact: bool) -> None:
    rng = random.Random(0)
    for _ in range(60):
        names = "abcde"[: rng.randint(1, 5)]
        floor = rng.choice([0.0, rng.random(), 1.0]) / len(names)
        priors = {name: rng.choice([0.01, 1.0, 100.0]) for name in names if rng.random() < 0.5}
        dgdo = Dgdo(
            warmup_steps=rng.randint(0, 2),
            beta_start=rng.random(),
            beta=rng.random(),
            min_weight=floor,
            invert=rng.random() < 0.5,
            importance_priors=priors,
            paper_exact=paper_exact,
        )
        for _ in range(5):
            metrics = dgdo.advantages(random_step(rng.randrange(10**6), names)).metrics
            weights = [metrics[f"dgdo/{name}/weight"] for name in names]
            assert sum(weights) == pytest.approx(1, abs=1e-9)
            assert min(weights) >= floor - 1e-12
            assert sum(dgdo.weights.values()) == pytest.approx(1, abs=1e-9)


# State.


def test_a_resumed_run_continues_exactly() -> None:
    settings: dict[str, Any] = {"warmup_steps": 2, "beta_warmup_steps": 5}
    straight, first, resumed = (make("dgdo", **settings) for _ in range(3))
    for step in range(4):
        straight.advantages(random_step(step))
        first.advantages(random_step(step))
    resumed.load_state_dict(first.state_dict())
    for step in range(4, 8):
        expected, found = straight.advantages(random_step(step)), resumed.advantages(random_step(step))
        assert torch.equal(found.values, expected.values)
        assert found.metrics == expected.metrics


def test_the_state_is_a_copy() -> None:
    dgdo = Dgdo(warmup_steps=0)
    dgdo.advantages(random_step(0))
    state = dgdo.state_dict()
    kept = {"step": state["step"], "weights": dict(state["weights"])}
    dgdo.advantages(random_step(1))
    assert state == kept


def test_the_function_keeps_its_state_in_a_dict() -> None:
    def rewards(step: int) -> dict[str, Tensor]:
        return dict(random_step(step).rewards)

    state: dict[str, Any] = {}
    algorithm = make("dgdo", warmup_steps=1)
    for step in range(4):
        found = advantages("dgdo", rewards(step), GROUPS, state=state, warmup_steps=1)
        assert torch.equal(found, algorithm.advantages(random_step(step)).values)
        assert state == algorithm.state_dict()
    assert state["estimator"]["step"] == 4


# What cannot be.


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_weight=0.4 leaves no room for 3 rewards"):
        Dgdo(min_weight=0.4).advantages(random_step(0, "abc"))
    with pytest.raises(ValueError, match=r"importance_priors names \['c'\]; the rewards are \['a', 'b'\]"):
        Dgdo(importance_priors={"c": 1.0}).advantages(random_step(0))
    for name in ("beta", "beta_start", "min_weight"):
        with pytest.raises(ValueError, match=f"algorithm.{name} must be a number from 0 to 1, got"):
            Dgdo(**{name: 1.1})  # type: ignore[arg-type]


def test_it_is_refused_before_anything_is_sampled() -> None:
    """With the rewards that the algorithm itself adds counted in."""
    make("dgdo", min_weight=0.5).check_rewards({"a": 1.0, "b": 1.0})
    with pytest.raises(ValueError, match="leaves no room for 3 rewards"):
        make("dgdo", min_weight=0.5, overlong_buffer=0.5).check_rewards({"a": 1.0, "b": 1.0})
    make("dgdo", importance_priors={"overlong": 2.0}, overlong_buffer=0.5).check_rewards({"a": 1.0, "c": 0.0})


def test_other_rewards_than_before_are_refused() -> None:
    dgdo = Dgdo()
    dgdo.advantages(random_step(0))
    with pytest.raises(ValueError, match=r"weights are for \['a', 'b'\], and the rewards are \['a', 'c'\]"):
        dgdo.advantages(random_step(1, "ac"))

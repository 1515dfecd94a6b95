"""Losses, aggregations, KL, the critic's loss and importance weights against verl's: values and gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithms.aggregation import Aggregation, divide
from covey.algorithms.correction import Correction
from covey.algorithms.functional import policy_loss
from covey.algorithms.gae import value_loss
from covey.algorithms.kl import Kl, kl_penalty
from covey.algorithms.ops import make_batch, token_rewards
from tests.oracles.cases import SEEDS, Case, case, gradient, samples
from tests.oracles.conftest import Ledger

REASON = "verl is not installed here: make oracles"
core = pytest.importorskip("verl.trainer.ppo.core_algos", reason=REASON)
workers = pytest.importorskip("verl.workers.config", reason=REASON)
correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason=REASON)

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def actor(**settings: Any) -> Any:
    return workers.ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **settings)


def theirs(name: str, step: Case, mode: str, logprobs: Tensor, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    loss = core.get_policy_loss_fn(name)
    return loss(
        old_log_prob=step.old,
        log_prob=logprobs,
        advantages=step.advantages,
        response_mask=step.mask,
        loss_agg_mode=mode,
        config=actor(**settings),
    )


def compare(
    ledger: Ledger, ours: str, other: str, step: Case, mode: str, options: dict[str, Any], settings: dict[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Value and gradient of the loss; the metrics of both."""
    logprobs = step.logprobs.clone().requires_grad_()
    expected, their_metrics = theirs(other, step, mode, logprobs, **settings)
    found, metrics = policy_loss(ours, logprobs, step.old, step.advantages, step.mask, aggregation=mode, **options)
    ledger.same_loss(f"loss {ours}", f"verl {other}", found, expected, of=logprobs)
    return metrics, their_metrics


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.2, 3.0), (0.1, 0.28, 3.0), (0.2, 0.3, 1.5)])
def test_ppo_clip(ledger: Ledger, seed: int, mode: str, low: float, high: float, dual: float) -> None:
    step = case(seed, holes=True, extreme=True)
    options = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    settings = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}
    metrics, other = compare(ledger, "ppo_clip", "vanilla", step, mode, options, settings)
    clipped = metrics["policy/clip_low"] + metrics["policy/clip_high"]
    ledger.same("policy/clip_low + policy/clip_high", "verl actor/pg_clipfrac", clipped, other["actor/pg_clipfrac"])


@pytest.mark.parametrize("seed", SEEDS)
def test_dapo_and_dr_grpo_are_names_for_settings(ledger: Ledger, seed: int) -> None:
    step = case(seed, extreme=True)
    compare(ledger, "dapo", "vanilla", step, "token-mean", {}, {"clip_ratio_high": 0.28})
    constant = {"global_batch_info": {"loss_scale_factor": 7}}
    compare(ledger, "dr_grpo", "vanilla", step, "seq-mean-token-sum-norm", {"norm_length": 7}, constant)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.3)])
def test_gspo(ledger: Ledger, seed: int, mode: str, low: float, high: float) -> None:
    """With token log-ratios of ±50, but answers whose mean stays below verl's limit of 10."""
    step = below_ten(case(seed, holes=True, extreme=True))
    options, settings = {"clip_low": low, "clip_high": high}, {"clip_ratio_low": low, "clip_ratio_high": high}
    metrics, other = compare(ledger, "gspo", "gspo", step, mode, options, settings)
    clipped = metrics["policy/clip_low"] + metrics["policy/clip_high"]
    ledger.same("policy/clip_low + policy/clip_high", "verl actor/pg_clipfrac", clipped, other["actor/pg_clipfrac"])


def below_ten(step: Case) -> Case:
    ratio = (step.logprobs - step.old) * step.mask
    mean = ratio.sum(-1, keepdim=True) / step.mask.sum(-1, keepdim=True)
    return replace(step, old=step.old + mean - mean.clamp(-9, 9))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.2, 0.28)])
def test_cispo(ledger: Ledger, seed: int, mode: str, low: float, high: float) -> None:
    step = case(seed, holes=True, extreme=True)
    options, settings = {"clip_low": low, "clip_high": high}, {"clip_ratio_low": low, "clip_ratio_high": high}
    compare(ledger, "cispo", "cispo", step, mode, options, settings)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (2.0, 0.5)])
def test_sapo(ledger: Ledger, seed: int, positive: float, negative: float) -> None:
    step = case(seed, holes=True, extreme=True)
    settings = {"tau_pos": positive, "tau_neg": negative}
    compare(ledger, "sapo", "sapo", step, "seq-mean-token-mean", settings, settings)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_policy_gradient(ledger: Ledger, seed: int, mode: str) -> None:
    compare(ledger, "policy_gradient", "gpg", case(seed, holes=True, extreme=True), mode, {}, {})


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "other"),
    [("ppo_clip", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo"), ("sapo", "sapo"), ("policy_gradient", "gpg")],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_losses_with_importance_weights(ledger: Ledger, seed: int, name: str, other: str, level: str) -> None:
    """Samples from an engine whose log-probs are `ref`: weighted before the loss in Covey, after it in verl."""
    step, mode = case(seed, holes=True), "seq-mean-token-mean"
    logprobs = step.logprobs.clone().requires_grad_()
    ratio = step.old - step.ref
    weight, _ = correction.compute_rollout_correction_weights(ratio, step.mask.long(), level, 2.0)
    expected, _ = core.get_policy_loss_fn(other)(
        old_log_prob=step.old,
        log_prob=logprobs,
        advantages=step.advantages,
        response_mask=step.mask,
        loss_agg_mode=mode,
        config=actor(),
        rollout_is_weights=weight,
    )
    options = {"clip_low": 0.2, "clip_high": 0.2} if name in ("ppo_clip", "gspo", "cispo") else {}
    options |= {"sampling_logprobs": step.ref, "correction": level, "aggregation": mode}
    found, _ = policy_loss(name, logprobs, step.old, step.advantages, step.mask, **options)
    ledger.same_loss(f"loss {name} with correction", f"verl {other} with rollout_is", found, expected, of=logprobs)


def one_each(step: Case) -> Case:
    """The step with one advantage per answer."""
    return replace(step, advantages=step.advantages[:, :1].expand(step.mask.shape))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cap", [20.0, 1.2])
@pytest.mark.parametrize(("kind", "bound"), [("tv", 0.05), ("kl", 0.01)])
def test_dppo(ledger: Ledger, seed: int, mode: str, cap: float, kind: str, bound: float) -> None:
    """The gradient: verl's value is that of a weighted log π, the paper's that of the ratio."""
    step = case(seed, holes=True)
    step = replace(step, old=step.old.clamp(max=-0.01))
    logprobs = step.logprobs.clone().requires_grad_()
    settings = {"clip_ratio": bound, "clip_ratio_low": bound, "clip_ratio_high": 2 * bound, "clip_ratio_c": cap}
    expected, other = theirs(f"dppo_{kind}", step, mode, logprobs, **settings)
    options = {"clip_low": bound, "clip_high": 2 * bound, "ratio_cap": cap, "aggregation": mode}
    found, metrics = policy_loss(f"dppo_{kind}", logprobs, step.old, step.advantages, step.mask, **options)
    name = f"loss dppo_{kind}, its gradient"
    ledger.same(name, f"verl dppo_{kind}", gradient(found, logprobs), gradient(expected, logprobs))
    clipped = metrics["policy/clip_low"] + metrics["policy/clip_high"]
    ledger.same("policy/clip_low + policy/clip_high", "verl actor/pg_clipfrac", clipped, other["actor/pg_clipfrac"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.3)])
def test_gmpo(ledger: Ledger, seed: int, low: float, high: float) -> None:
    step = one_each(case(seed, holes=True))
    options, settings = {"clip_low": low, "clip_high": high}, {"clip_ratio_low": low, "clip_ratio_high": high}
    compare(ledger, "gmpo", "geo_mean", step, "seq-mean-token-mean", options, settings)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_clip_cov(ledger: Ledger, seed: int, mode: str) -> None:
    """With all tokens of the band left out: nothing is left to chance."""
    band = workers.PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=1.5)
    options = {"clip_cov_ratio": 1.0, "clip_cov_low": 0.2, "clip_cov_high": 1.5, "clip_low": 0.2, "clip_high": 0.3}
    settings = {"policy_loss": band, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    metrics, other = compare(ledger, "clip_cov", "clip_cov", case(seed, holes=True), mode, options, settings)
    ledger.same("cov/held_back", "verl actor/pg_clipfrac", metrics["cov/held_back"], other["actor/pg_clipfrac"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_kl_cov(ledger: Ledger, seed: int, mode: str) -> None:
    held = workers.PolicyLossConfig(kl_cov_ratio=0.1, ppo_kl_coef=0.7)
    options = {"kl_cov_ratio": 0.1, "kl_cov_coef": 0.7}
    compare(ledger, "kl_cov", "kl_cov", case(seed, holes=True), mode, options, {"policy_loss": held})


def test_sapo_can_be_aggregated_otherwise(ledger: Ledger) -> None:
    """verl's SAPO takes the mean of each answer for every `loss_agg_mode`; Covey follows the setting."""
    step = case(0)
    expected, _ = theirs("sapo", step, "token-mean", step.logprobs)
    fixed, _ = theirs("sapo", step, "seq-mean-token-mean", step.logprobs)
    assert float(expected) == float(fixed)
    found, _ = policy_loss("sapo", step.logprobs, step.old, step.advantages, step.mask, aggregation="token-mean")
    gate = torch.where(step.advantages > 0, 1.0, 1.05)
    token = -4 / gate * torch.sigmoid(gate * (torch.exp(step.logprobs - step.old) - 1)) * step.advantages
    assert float(found) == pytest.approx(float(token[step.mask].mean()))
    because = "the configured aggregation; verl's sapo always takes seq-mean-token-mean"
    ledger.differs("loss sapo, token-mean", "verl sapo", found, expected, because=because)


def test_gspo_beyond_a_mean_log_ratio_of_ten(ledger: Ledger) -> None:
    """One token, log-ratio 12, advantage −1. The ratio is e¹² in value and gradient; verl holds log s to at most 10, in
    value, and beyond it a bad answer has no gradient any more."""
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.tensor([[-13.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    bad = torch.tensor([[-1.0]], dtype=torch.float64)
    step = Case(["a"], bad[:, 0], mask, logprobs, old, old, old, bad)
    expected, _ = theirs("gspo", step, "seq-mean-token-mean", logprobs)
    found, _ = policy_loss("gspo", logprobs, old, bad, mask)
    assert found.item() == pytest.approx(math.exp(12))
    assert float(gradient(found, logprobs)) == pytest.approx(math.exp(12))
    assert expected.item() == pytest.approx(math.exp(10))
    assert float(gradient(expected, logprobs)) == 0
    because = "log s is clamped to ±20; verl's to at most 10, where a bad answer loses its gradient"
    ledger.differs("loss gspo, log s = 12 and a bad answer", "verl gspo", found, expected, because=because)


# Aggregations.


def aggregate(mode: str, x: Tensor, mask: Tensor, norm_length: int | None = None) -> Tensor:
    rows = torch.arange(len(x))
    batch = make_batch(
        rows=(),
        group_N=rows,
        rewards_N=torch.zeros(len(x)),
        episode_R=rows,
        mask_RT=mask,
        old_logprobs_RT=x.detach(),
        ref_logprobs_RT=None,
        advantages_RT=x.detach(),
        max_tokens=mask.shape[1],
    )
    return divide({"x": Aggregation(mode, norm_length)(x, batch)}, batch)["x"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("empty", [False, True])
def test_aggregations(ledger: Ledger, seed: int, mode: str, empty: bool) -> None:
    """Also with an answer of which nothing was sampled: it counts for nobody."""
    step = case(seed, holes=True, empty=empty)
    x = step.values.clone().requires_grad_()
    expected, found = core.agg_loss(x, step.mask, mode), aggregate(mode, x, step.mask)
    ledger.same_loss(f"aggregation {mode}", f"verl agg_loss {mode}", found, expected, of=x)


@pytest.mark.parametrize("seed", SEEDS)
def test_norm_length(ledger: Ledger, seed: int) -> None:
    step, mode = case(seed), "seq-mean-token-sum-norm"
    expected = core.agg_loss(step.values, step.mask, mode, loss_scale_factor=50)
    ledger.same(f"aggregation {mode}", f"verl agg_loss {mode}", aggregate(mode, step.values, step.mask, 50), expected)


def test_a_mean_over_tokens_has_no_epsilon(ledger: Ledger) -> None:
    """Two tokens of loss 1: their mean is 1. verl divides by 2 + 1e-8, which shows where the mask is float64 (to the
    sum of a boolean mask it is added in float32, and vanishes)."""
    x, mode = torch.ones(1, 2, dtype=torch.float64), "seq-mean-token-mean"
    found, expected = aggregate(mode, x, x.bool()), core.agg_loss(x, x, mode)
    assert float(found) == 1
    assert float(expected) == 2 / (2 + 1e-8)
    because = "a mean without the 1e-8 that verl adds to the number of tokens"
    thing = "aggregation seq-mean-token-mean, to the last digit"
    ledger.differs(thing, "verl agg_loss", found, expected, because=because)


# KL.


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_kl_estimators(ledger: Ledger, seed: int, name: str) -> None:
    step = case(seed)
    logprobs = step.logprobs.clone().requires_grad_()
    expected, found = core.kl_penalty(logprobs, step.ref, name), kl_penalty(logprobs, step.ref, name)
    assert expected.max().item() < 10  # verl's limit
    ledger.same(f"KL {name}", f"verl kl_penalty {name}", found, expected)
    ledger.same_loss(f"KL {name}", f"verl kl_penalty {name}", found.sum(), expected.sum(), of=logprobs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["kl", "abs", "mse"])
def test_kl_estimators_far_away(ledger: Ledger, seed: int, name: str) -> None:
    step = case(seed, extreme=True)
    expected, found = core.kl_penalty(step.logprobs, step.old, name), kl_penalty(step.logprobs, step.old, name)
    ledger.same(f"KL {name}", f"verl kl_penalty {name}", found, expected)


@pytest.mark.parametrize(("d", "own", "other"), [(5.0, math.exp(5) - 6, 10.0), (-15.0, math.exp(-15) + 14, 10.0)])
def test_k3_is_not_cut_at_ten(ledger: Ledger, d: float, own: float, other: float) -> None:
    """d = log π_ref − log π. verl cuts k3 at 10, where a token that is far from the reference is no longer pulled back:
    its gradient is 0. Covey's is 1 − e^d."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.0 + d], dtype=torch.float64)
    found, expected = kl_penalty(logprobs, ref, "k3"), core.kl_penalty(logprobs, ref, "k3")
    assert found.item() == pytest.approx(own)
    assert expected.item() == other
    assert float(gradient(found.sum(), logprobs)) == pytest.approx(1 - math.exp(d))
    assert float(gradient(expected.sum(), logprobs)) == 0
    because = "verl clamps k3 at 10, which has no gradient back to the reference"
    ledger.differs("KL k3 above 10", "verl kl_penalty k3", found, expected, because=because)


def test_k3_never_pushes_away_from_the_reference() -> None:
    """d = log π_ref − log π = 25: k3 falls as log π rises, by e^d − 1. verl stops there, with gradient 0; a gradient
    that says the opposite is wrong."""
    logprobs = torch.tensor([-30.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-5.0], dtype=torch.float64)
    assert float(gradient(core.kl_penalty(logprobs, ref, "k3").sum(), logprobs)) == 0
    assert float(gradient(kl_penalty(logprobs, ref, "k3").sum(), logprobs)) <= 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["kl", "mse", "low_var_kl"])
def test_kl_in_the_reward_and_its_controller(ledger: Ledger, seed: int, estimator: str) -> None:
    """Five steps: the rewards of each token and the coefficient, which follows the KL of the step before."""
    trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer", reason=REASON)
    protocol = pytest.importorskip("verl.protocol", reason=REASON)
    own = Kl(kl_coef=0.2, kl_in="reward", kl_estimator=estimator, kl_target=0.1, kl_horizon=50)
    settings = SimpleNamespace(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=50)
    controller = core.get_kl_controller(settings)
    for number in range(5):
        step = case(100 * seed + number, holes=True)
        step = replace(step, old=step.ref + (step.old - step.ref).clamp(-2, 2))
        columns = {"old_log_probs": step.old, "ref_log_prob": step.ref, "response_mask": step.mask.long()}
        columns["token_level_scores"] = step.on_last_token()
        data = protocol.DataProto.from_dict(columns)
        data, _ = trainer.apply_kl_penalty(data, controller, kl_penalty=estimator)
        shaped, _ = own.shape(samples(step))
        expected = data.batch["token_level_rewards"] * step.mask
        ledger.same("KL in the reward", "verl apply_kl_penalty", token_rewards(shaped), expected)
        ledger.same("adaptive kl_coef", "verl AdaptiveKLController", own.coef, controller.value)


# The critic.


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_value_loss(ledger: Ledger, seed: int, clip: float) -> None:
    step = case(seed, holes=True)
    old, returns = step.values, step.advantages
    values = (old + 0.5 * (step.logprobs + 1.5)).requires_grad_()
    expected, _ = core.compute_value_loss(values, returns, old, step.mask, clip)
    found = value_loss(values, old, returns, clip)[step.mask].mean()
    ledger.same_loss("value loss", "verl compute_value_loss", found, expected, of=values)


# Importance weights.


def weights(step: Case, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """Of each sampled token; 0 elsewhere. The case's `old` log-probs stand for the engine's."""
    rows = torch.arange(len(step.groups))
    found, metrics = Correction(**settings).weights(step.logprobs, step.old, step.mask, rows, len(rows))
    return found * step.mask, metrics


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [2.0, 5.0])
def test_truncated_importance_weights(ledger: Ledger, seed: int, level: str, cap: float) -> None:
    step = case(seed, holes=True, extreme=True)
    ratio = step.logprobs - step.old
    expected, other = correction.compute_rollout_correction_weights(ratio, step.mask.long(), level, cap)
    found, metrics = weights(step, correction=level, correction_cap=cap)
    ledger.same(f"correction {level}", f"verl rollout_is={level}", found, expected)
    share = other["rollout_is_eff_sample_size"]
    ledger.same("correction/ess", "verl rollout_is_eff_sample_size", metrics["correction/ess"], share)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rejection_band(ledger: Ledger, seed: int, level: str) -> None:
    step = case(seed, holes=True, extreme=True)
    ratio = step.logprobs - step.old
    expected, _ = correction.compute_rollout_correction_weights(ratio, step.mask.long(), level, "0.5_3.0")
    found, _ = weights(step, correction=level, correction_cap=3.0, reject_below=0.5, reject_above=3.0)
    ledger.same(f"correction {level}, reject_…", f"verl rollout_is={level}, lower_upper", found, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("level", "other"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_rejection_without_weights(ledger: Ledger, seed: int, level: str, other: str) -> None:
    """verl's band is of q/π_old, Covey's of π_old/q."""
    step = case(seed, holes=True)
    band = {"rollout_rs": other, "rollout_rs_threshold": "0.8_1.3"}
    kept, _ = correction.compute_rollout_rejection_mask(step.logprobs - step.old, step.mask.double(), **band)
    found, _ = weights(step, correction="recompute", reject_level=level, reject_below=1 / 1.3, reject_above=1 / 0.8)
    ledger.same(f"correction recompute, reject_level={level}", f"verl rollout_rs={other}", found, kept)


def test_rejected_tokens_keep_their_place_in_the_mean(ledger: Ledger) -> None:
    """Two tokens of loss −1 each, the second with a ratio of 5 and rejected. Covey: (−1 + 0)/2. verl's rejection
    (rollout_rs) takes it out of the mask, so that the other counts double: −1."""
    logprobs = torch.zeros(1, 2, dtype=torch.float64)
    sampling = torch.tensor([[0.0, -math.log(5)]], dtype=torch.float64)
    mask, good = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 2, dtype=torch.float64)
    options = {"correction": "token", "reject_above": 3.0, "reject_below": 1 / 3}
    found, _ = policy_loss("ppo_clip", logprobs, logprobs, good, mask, sampling_logprobs=sampling, **options)
    band = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.3333_3.0"}
    _, kept, _ = correction.compute_rollout_correction_and_rejection_mask(logprobs, sampling, mask.long(), **band)
    expected, _ = core.get_policy_loss_fn("vanilla")(
        old_log_prob=logprobs, log_prob=logprobs, advantages=good, response_mask=kept, config=actor()
    )
    assert kept.tolist() == [[1, 0]]
    assert float(found) == -0.5
    assert float(expected) == -1
    because = "rejected tokens still count in the mean, so that rejection never raises the weight of the others"
    ledger.differs("rejected tokens in the mean", "verl rollout_rs", found, expected, because=because)

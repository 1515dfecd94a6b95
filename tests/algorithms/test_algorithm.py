"""An algorithm's parts, joined: what goes with what, defaults, names and refusals, needs and state."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.algorithms import ALGORITHMS, LOSSES, make, schema, settings
from covey.algorithms.aggregation import Aggregation, GroupSum, divide
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.catalogue import ALIASES
from covey.algorithms.ops import make_batch
from covey.protocols import TokenOutputs
from covey.types import Samples
from tests.algorithms.helpers import COMBINABLE, EXCHANGEABLE, F64, PAIRED, random_batch, samples_of


def random_step(seed: int = 0) -> tuple[torch.Tensor, Samples]:
    """Log-probs, and a step with everything that any algorithm may need: two rewards, a reference, a critic, greedy
    answers and log-probs of another engine, for the forked rows of `random_batch`."""
    logprobs, batch = random_batch(seed, spread=1e-4)  # so near that no loss is clipped altogether
    rng = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=F64)

    samples = samples_of(
        {"right": noise(7), "short": noise(7)},
        batch.group_N,
        mask=batch.mask_RT.tolist(),
        episode=batch.episode_R.tolist(),
        old_logprobs_RT=batch.old_logprobs_RT,
        sampling_logprobs_RT=batch.old_logprobs_RT + 0.1 * noise(9, 5),
        ref_logprobs_RT=batch.ref_logprobs_RT,
        values_RT=noise(9, 5),
        score_norms_RT=noise(9, 5) ** 2,
        baseline_rewards_G=noise(3),
        max_tokens=10,
    )
    return logprobs, samples


def one_update(algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient, from rewards on, as a run goes."""
    logprobs, samples = random_step()
    samples, _ = algorithm.shape(samples)
    values = algorithm.advantages(samples).values
    batch = make_batch(
        rows=(),
        group_N=samples.group_N,
        rewards_N=samples.total_reward(),
        episode_R=samples.episode_R,
        mask_RT=samples.mask_RT,
        old_logprobs_RT=samples.old_logprobs_RT,
        ref_logprobs_RT=samples.ref_logprobs_RT,
        advantages_RT=values if values.dim() == 2 else values[samples.episode_R][:, None].expand(9, 5),
        max_tokens=samples.max_tokens,
    )
    x = logprobs.clone().requires_grad_()
    out = TokenOutputs(x, torch.zeros_like(x))
    loss = torch.stack(list(divide(algorithm.loss(out, batch), batch).values())).sum()
    metrics = algorithm.metrics(out, batch)
    assert all(math.isfinite(value) for value in metrics.values())
    return loss, torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_with_every_loss_or_gives_the_reason(name: str, loss: str) -> None:
    if name != loss and (name in PAIRED or loss in PAIRED):
        with pytest.raises(ValueError, match="belong together"):
            make(name, loss=loss)
        return
    value, gradient = one_update(make(name, loss=loss))
    assert bool(value.isfinite()) and bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 1e-6


ONLY_IN_LOSS = {
    "gdpo": "normalises each reward by itself",
    "dgdo": "normalises each reward by itself",
    "maxrl": "divides by the mean reward",
    "raft": "accepts answers by the sign of their reward",
}  # where a KL cannot be in the reward


@pytest.mark.parametrize("name", COMBINABLE)
def test_every_algorithm_goes_with_kl_correction_and_shaping(name: str) -> None:
    kl_in = "loss" if name in ONLY_IN_LOSS else "reward"
    algorithm = make(name, kl_coef=0.1, kl_in=kl_in, kl_old_coef=0.1, correction="sequence", overlong_buffer=0.5)
    value, gradient = one_update(algorithm)
    assert bool(value.isfinite()) and bool(gradient.isfinite().all())


# Defaults.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gvpo", {"loss": "gvpo", "beta": 0.1, "use_bessel_correction": True, "reference": "old"}),
        ("grpo", {"loss": "ppo_clip", "aggregation": "seq-mean-token-mean", "std_normalize": True, "clip_high": 0.2}),
        ("dr_grpo", {"loss": "dr_grpo", "aggregation": "seq-mean-token-sum-norm", "std_normalize": False}),
        (
            "dapo",
            {"aggregation": "token-mean", "clip_low": 0.2, "clip_high": 0.28, "filter_groups": True}
            | {"overlong_buffer": 0.2, "std_normalize": True},
        ),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}),
        ("cispo", {"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean"}),
        ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05, "aggregation": "seq-mean-token-mean"}),
        ("gdpo", {"loss": "ppo_clip", "epsilon": 1e-6}),
        (
            "dgdo",
            {"beta": 0.9, "epsilon": 1e-6, "warmup_steps": 30, "beta_start": 0.5, "beta_warmup_steps": 200}
            | {"min_weight": 0.15, "invert": False, "importance_priors": None, "max_instability": 10.0},
        ),
        ("ppo", {"gamma": 1.0, "lam": 1.0, "aggregation": "token-mean", "loss": "ppo_clip", "dual_clip": 3.0}),
        ("reinforce_plus_plus", {"gamma": 1.0, "aggregation": "token-mean"}),
        ("reinforce_plus_plus_baseline", {"aggregation": "token-mean"}),
        ("rloo", {"loss": "policy_gradient", "aggregation": "token-mean", "kl_coef": 0.0}),
        ("remax", {"loss": "policy_gradient"}),
        ("opo", {"loss": "policy_gradient"}),
        ("gpg", {"loss": "policy_gradient"}),
        ("grpo_passk", {"loss": "ppo_clip", "std_normalize": True}),
        ("luspo", {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-sum", "loss": "luspo"}),
        ("gmpo", {"clip_low": 0.4, "clip_high": 0.4, "aggregation": "seq-mean-token-mean", "std_normalize": True}),
        (
            "vespo",
            {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
            | {"aggregation": "token-mean", "correction": "auto"},
        ),
        (
            "dppo",
            {"loss": "dppo_tv", "divergence": "tv", "clip_low": 0.15, "clip_high": 0.15, "ratio_cap": 20.0}
            | {"aggregation": "seq-mean-token-sum-norm", "std_normalize": False},
        ),
        ("clip_cov", {"clip_cov_ratio": 2e-4, "clip_cov_low": 1.0, "clip_cov_high": 5.0, "clip_high": 1.0}),
        ("kl_cov", {"kl_cov_ratio": 2e-4, "kl_cov_coef": 1.0, "aggregation": "token-mean"}),
        ("maxrl", {"loss": "ppo_clip", "aggregation": "token-mean", "clip_high": 0.2}),
        ("otb", {"loss": "ppo_clip", "aggregation": "token-mean"}),
        ("raft", {"loss": "ppo_clip", "aggregation": "seq-mean-token-mean"}),
        ("online_dpo", {"loss": "online_dpo", "beta": 0.1}),
    ],
)
def test_vetted_defaults(name: str, expected: dict[str, Any]) -> None:
    found = {key: default for key, (_, default) in settings(name).items()}
    assert {key: found[key] for key in expected} == expected
    algorithm = make(name)
    for part in algorithm.parts.values():
        for field in dataclasses.fields(part):
            if field.name in expected:
                assert getattr(part, field.name) == expected[field.name]


@pytest.mark.parametrize("name", COMBINABLE)
@pytest.mark.parametrize("loss", EXCHANGEABLE)
def test_a_loss_that_is_chosen_brings_its_own_defaults(name: str, loss: str) -> None:
    """Dr. GRPO's loss is its aggregation: without it the choice would be without effect."""
    aggregation = make(name, loss=loss).aggregation
    assert isinstance(aggregation, Aggregation)
    entry = ALGORITHMS[name]
    usual = entry.defaults if loss == entry.loss else {}  # an algorithm may change its usual loss's defaults
    assert aggregation.aggregation == {"aggregation": "token-mean", **LOSSES[loss].defaults, **usual}["aggregation"]


def test_a_setting_given_wins_over_every_default() -> None:
    algorithm = make("dapo", clip_high=0.5, filter_groups=False, aggregation="seq-mean-token-sum", std_normalize=False)
    assert algorithm.objective.clip_high == 0.5  # type: ignore[attr-defined]
    assert not algorithm.filter.filter_groups
    assert algorithm.aggregation == Aggregation("seq-mean-token-sum")
    assert algorithm.estimator.std_normalize is False  # type: ignore[attr-defined]


# Names.


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("gae", "ppo"),
        ("reinforce++", "reinforce_plus_plus"),
        ("reinforce++-baseline", "reinforce_plus_plus_baseline"),
        ("reinforce++_baseline", "reinforce_plus_plus_baseline"),
        ("optimal_token_baseline", "otb"),
        ("raft++", "raft"),
        ("dpo", "online_dpo"),
    ],
)
def test_other_spellings_of_names(typed: str, meant: str) -> None:
    assert ALIASES[typed] == meant
    assert make(typed) == make(meant)


def test_names_are_unambiguous() -> None:
    assert not set(ALIASES) & set(ALGORITHMS)
    assert len(ALIASES) == sum(len(entry.also) for entry in ALGORITHMS.values())


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"unknown algorithm  gvpoo\n  did you mean   gvpo\?"):
        make("gvpoo")
    with pytest.raises(ValueError, match=r"unknown setting of grpo  clip_hihg\n  did you mean   clip_high\?"):
        make("grpo", clip_hihg=0.1)
    with pytest.raises(ValueError, match=r"unknown loss  gsop\n  did you mean   gspo\?"):
        make("grpo", loss="gsop")


def test_a_setting_of_another_algorithm_is_unknown() -> None:
    with pytest.raises(ValueError, match="unknown setting of rloo  std_normalize"):
        make("rloo", std_normalize=False)
    with pytest.raises(ValueError, match="unknown setting of grpo  tau_pos"):
        make("grpo", tau_pos=1.0)
    assert make("grpo", loss="sapo", tau_pos=2.0).objective.tau_pos == 2.0  # type: ignore[attr-defined]


# Refusals.


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("kl_coef", 0.1, "an external KL breaks GVPO's zero sum"),
        ("kl_estimator", "k3", "an external KL breaks GVPO's zero sum"),
        ("kl_old_coef", 0.1, "an external KL breaks GVPO's zero sum"),
        ("correction", "token", "importance weights would break GVPO's zero sum"),
        ("correction_cap", 2.0, "importance weights would break GVPO's zero sum"),
        ("reject_above", 2.0, "rejecting single answers would break GVPO's zero sum"),
        ("aggregation", "token-mean", "gvpo sums over tokens by its theory"),
        ("norm_length", 10, "gvpo sums over tokens by its theory"),
    ],
)
def test_what_would_break_gvpo_is_refused_with_the_reason(key: str, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{key} does not go with gvpo\n  {reason}"):
        make("gvpo", **{key: value})
    assert key in settings("grpo")


@pytest.mark.parametrize("name", ONLY_IN_LOSS)
def test_a_kl_in_the_reward_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} {ONLY_IN_LOSS[name]}.*kl_in=loss"):
        make(name, kl_in="reward", kl_coef=0.1)
    assert make(name, kl_in="reward").needs.reference is False  # no KL: nothing to refuse
    assert make(name, kl_coef=0.1).needs.reference


# The joined algorithm.


def test_needs_are_those_of_all_parts() -> None:
    assert not make("grpo").needs.reference
    assert make("gvpo", reference="initial").needs.reference and not make("gvpo").needs.reference
    assert make("ppo", kl_coef=0.1, correction="token").needs.values
    both = make("ppo", kl_coef=0.1, correction="token").needs
    assert both.reference and both.proximal and both.values and both.min_group_size == 1
    assert make("remax").needs.greedy_baseline and make("remax").needs.min_group_size == 1
    assert {name for name in ALGORITHMS if make(name).needs.min_group_size != 2} == {
        "ppo",
        "remax",
        "reinforce_plus_plus",
        "raft",
    }
    assert {name for name in ALGORITHMS if make(name).needs.score_norms} == {"otb"}


def test_what_is_coupled() -> None:
    coupled = {name: loss.objective.couples for name, loss in LOSSES.items()}  # type: ignore[attr-defined]
    episodes = dict.fromkeys(("gspo", "luspo", "gmpo", "vespo"), "episodes")
    others = {"gvpo": "groups", "online_dpo": "groups", "clip_cov": "batch", "kl_cov": "batch"}
    assert coupled == dict.fromkeys(LOSSES, "nothing") | episodes | others


def test_state_is_kept_by_part() -> None:
    both = make("dgdo", kl_coef=0.1, kl_target=0.1)
    assert set(both.state_dict()) == {"estimator", "kl"}
    assert make("grpo").state_dict() == {}
    with pytest.raises(ValueError, match=r"dgdo has the state \['estimator'\], but the checkpoint holds \[\]"):
        make("dgdo").load_state_dict({})


def test_two_algorithms_share_no_state() -> None:
    first, second = make("dgdo"), make("dgdo")
    _, samples = random_step()
    first.advantages(samples)
    assert first.state_dict()["estimator"]["step"] == 1
    assert second.state_dict()["estimator"] == {"step": 0, "weights": {}}


def test_gvpo_is_estimator_and_loss_in_one() -> None:
    assert set(ALGORITHMS) - set(COMBINABLE) == set(PAIRED) == {"gvpo", "online_dpo"}
    gvpo = make("gvpo", beta=0.3)
    assert gvpo.estimator is gvpo.objective
    assert gvpo.aggregation == GroupSum() and gvpo.kl is None and gvpo.correction is None


# The schema, and the pages.


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_schema_of_an_algorithm_is_what_make_takes(name: str) -> None:
    made: Any = schema(name)
    for loss, form in {None: made, **made.losses}.items():
        values = dataclasses.asdict(form())
        assert values.pop("name") == name and values["loss"] == (loss or ALGORITHMS[name].loss)
        assert make(name, **values) == make(name, loss=loss)
    assert set(made.losses) == ({name} if name in PAIRED else set(EXCHANGEABLE))


CLASSES: set[type] = {entry.estimator for entry in ALGORITHMS.values()} | {loss.objective for loss in LOSSES.values()}
PAGES = sorted({Path(inspect.getfile(cls)) for cls in CLASSES})

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


@every_page
def test_an_algorithm_fits_a_page(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 125


@every_page
def test_an_algorithm_opens_with_its_paper_its_equation_and_its_deviations(page: Path) -> None:
    text = importlib.import_module(f"covey.algorithms.{page.stem}").__doc__ or ""
    assert "Deviations" in text and "Shapes:" in text
    assert "http" in text or page.stem == "dgdo"  # which has no paper
    assert any(line.startswith("    ") for line in text.splitlines())


@pytest.mark.parametrize("cls", sorted(CLASSES, key=str), ids=str)
def test_every_setting_says_what_it_does(cls: Any) -> None:
    """`covey config explain` prints the comment beside it."""
    lines = inspect.getsource(cls).splitlines()
    for field in dataclasses.fields(cls):
        if field.init:
            assert any(line.startswith(f"    {field.name}: ") and "  # " in line for line in lines), field.name

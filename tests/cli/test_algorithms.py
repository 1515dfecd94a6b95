"""Every algorithm and regulariser on the whole pipeline, from the command line, with a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from covey.algorithms import ALGORITHMS
from covey.cli.main import main
from tests.algorithms.helpers import EXCHANGEABLE

REWARDS = """
def variety(final_answer):
    return len(set(final_answer)) / 10

def short(final_answer):
    return None if final_answer.startswith("a") else -len(final_answer) / 10

def constant(final_answer):
    return 1.0

def overlong(final_answer):
    return 0.0
"""
SMALL = [
    "reward=[rewards.py:variety,rewards.py:short]",
    "data.train_size=24",
    "data.val_size=2",
    "data.train_batch_size=3",
    "rollout.group_size=4",
    "rollout.max_tokens=8",
    "loop.total_steps=2",
    "loop.save_final=false",
    "learner.lr=1e-3",
    "eval.before=false",
    "eval.after=false",
]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)


def train(model: Path, *settings: str) -> list[dict[str, float]]:
    assert main(["train", f"model={model}", *SMALL, *settings]) == 0
    (run,) = Path("outputs").glob("*/*")
    return [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains(tiny_model_folder: Path, algorithm: str) -> None:
    steps = train(tiny_model_folder, f"algorithm={algorithm}")
    assert len(steps) == 2
    for metrics in steps:
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)  # one update: on-policy
    assert any(metrics["grad/norm"] > 0 for metrics in steps)


@pytest.mark.parametrize("loss", EXCHANGEABLE)
def test_every_loss_trains_with_another_estimator_and_several_updates(tiny_model_folder: Path, loss: str) -> None:
    settings = ("algorithm=gdpo", f"algorithm.loss={loss}", "learner.mini_batch_size=1", "learner.epochs=2")
    steps = train(tiny_model_folder, *settings)
    assert steps[-1]["optim/updates"] == 6
    assert steps[-1]["policy/ratio_mean"] != pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        (["algorithm=grpo", "algorithm.kl_coef=0.1"], {"kl/loss", "kl/reference"}),
        (["algorithm=grpo", "algorithm.kl_coef=0.1", "algorithm.kl_estimator=full"], {"kl/loss", "kl/reference"}),
        (
            ["algorithm=grpo", "algorithm.kl_coef=0.1", "algorithm.kl_estimator=full", "model.lora.rank=2"],
            {"kl/loss", "kl/reference"},
        ),
        (["algorithm=rloo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], {"kl/reward", "kl/coef", "kl/samples"}),
        (
            ["algorithm=rloo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=full"],
            {"kl/reward"},
        ),
        (
            ["algorithm=ppo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_target=0.1"],
            {"kl/reward", "kl/coef"},
        ),
        (["algorithm=grpo", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.1"], {"kl/loss", "kl/coef"}),
        (["algorithm=grpo", "algorithm.kl_old_coef=0.1", "learner.epochs=2"], {"kl_old/loss"}),
        (["algorithm=grpo", "learner.entropy_coef=0.01"], {"entropy/loss"}),
        (["algorithm=grpo", "rollout.top_p=0.7"], {"correction/ess", "correction/weight_mean"}),
        (["algorithm=grpo", "algorithm.correction=sequence", "algorithm.reject_above=1.5"], {"correction/rejected"}),
        (
            [
                *("algorithm=rloo", "algorithm.correction=recompute"),
                *("algorithm.reject_level=geometric", "algorithm.reject_above=1.5"),
            ],
            {"correction/rejected", "correction/mismatch"},
        ),
        (["algorithm=kl_cov", "learner.epochs=2", "learner.micro_batch_size=1"], {"cov/held_back", "cov/mean"}),
        (["algorithm=vespo", "mode=async", "learner.epochs=2", "learner.micro_batch_size=1"], {"policy/weight"}),
        (["algorithm=otb", "model.lora.rank=2", "model.dtype=bfloat16"], {"otb/score_norm"}),
        (["algorithm=online_dpo", "model.lora.rank=2", "learner.micro_batch_size=1"], {"dpo/pairs", "dpo/margin"}),
        (["algorithm=gdpo", "algorithm.overlong_buffer=4"], {"reward/overlong/mean", "gdpo/overlong/mean"}),
        (["algorithm=gvpo", "algorithm.truncated=penalise"], {"reward/truncated/mean"}),
        (["algorithm=ppo", "critic.shared=true"], {"value/loss", "value/explained_variance"}),
        (["algorithm=ppo", "model.dtype=bfloat16"], {"value/loss", "value/grad_norm"}),
        (["algorithm=ppo", "critic.shared=true", "model.lora.rank=2"], {"value/loss"}),
        (["algorithm=ppo", "model.gradient_checkpointing=true", "rollout.group_size=1"], {"value/clipped"}),
        (["algorithm=remax", "rollout.group_size=1"], {"remax/greedy_reward"}),
        (["algorithm=dgdo", "algorithm.warmup_steps=1"], {"dgdo/variety/weight", "dgdo/effective_beta"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_regularisers_and_controls(tiny_model_folder: Path, settings: list[str], shown: set[str]) -> None:
    for metrics in train(tiny_model_folder, *settings):
        assert shown <= set(metrics)
        assert all(math.isfinite(value) for value in metrics.values()), metrics


# One of each kind; the others are slow.
MASKED = ("gvpo", "grpo", "ppo", "remax", "online_dpo", "gigpo")


@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=[pytest.mark.slow] * (name not in MASKED)) for name in ALGORITHMS]
)
def test_truncated_answers_are_not_learned_from_if_masked(tiny_model_folder: Path, algorithm: str) -> None:
    """With one token, every answer but a bare end token is cut off."""
    settings = (f"algorithm={algorithm}", "algorithm.truncated=mask", "rollout.max_tokens=1", "critic.shared=true")
    first, _ = train(tiny_model_folder, *settings)
    assert first["response/truncated"] == 1.0
    assert first["grad/norm"] == 0
    if algorithm == "gvpo":
        assert first["gvpo/empty"] == 1.0


def test_gspo_clips_nothing_on_policy_in_half_precision(tiny_model_folder: Path) -> None:
    """Its bounds are tighter than bfloat16: the old log-probs must be the learner's own."""
    first, _ = train(tiny_model_folder, "algorithm=gspo", "model.dtype=bfloat16")
    assert first["policy/clip_low"] == first["policy/clip_high"] == 0


def test_a_critic_learns_alone_while_it_warms_up(tiny_model_folder: Path) -> None:
    first, second = train(tiny_model_folder, "algorithm=ppo", "critic.warmup_steps=1", "critic.lr=1e-2")
    assert "policy/loss" not in first and first["optim/lr"] == 0 and first["grad/norm"] == 0
    assert first["value/grad_norm"] > 0
    assert second["grad/norm"] > 0 and "policy/loss" in second
    assert second["value/mean"] != 0, "the critic has moved"


def test_truncated_sampling_is_corrected_by_importance_weights(tiny_model_folder: Path) -> None:
    """Within the nucleus the sampler is more certain than the policy: every ratio to it is below 1."""
    first, _ = train(tiny_model_folder, "algorithm=grpo", "rollout.top_p=0.5")
    assert first["correction/weight_mean"] < 0.9
    assert first["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)  # to the learner's own old policy


@pytest.mark.parametrize(
    ("algorithm", "remark"),
    [("vespo", "importance weights correct for it"), ("raft", "importance weights"), ("gvpo", "nothing")],
)
def test_a_loss_that_weighs_by_the_sampler_needs_no_correction(
    tiny_model_folder: Path, algorithm: str, remark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"algorithm={algorithm}", "rollout.top_p=0.5", "--validate-only"]
    assert main(["train", f"model={tiny_model_folder}", *SMALL, *words]) == 0
    shown = capsys.readouterr()
    assert f"truncate the sampling distribution: {remark}" in " ".join((shown.out + shown.err).split())


def test_groups_without_signal_are_replaced(tiny_model_folder: Path) -> None:
    filtered = ("algorithm=grpo", "algorithm.filter_groups=true")
    first, _ = train(tiny_model_folder, *filtered, "reward=[rewards.py:variety]", "rollout.max_tokens=2")
    assert first["groups/filtered"] > 0 and first["groups/refills"] > 0
    assert first["groups/flat"] == 0
    assert "reward/unfiltered_mean" in first


def test_a_run_in_which_nothing_ever_differs_goes_on_and_says_so(tiny_model_folder: Path) -> None:
    settings = (
        "algorithm=grpo",
        "algorithm.filter_groups=true",
        "algorithm.max_refills=2",
        "reward=rewards.py:constant",
    )
    first, _ = train(tiny_model_folder, *settings)
    assert first["groups/refills"] == 2 and first["groups/flat"] == 1
    assert first["groups/filtered"] == 6 and first["groups/total"] == 3
    assert first["grad/norm"] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=dgdo", "algorithm.min_weight=0.6"], "min_weight=0.6 leaves no room for 2 rewards"),
        (["algorithm=dgdo", "algorithm.importance_priors.shrt=2"], "importance_priors names ['shrt']"),
        (["algorithm=gdpo", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "use kl_in=loss"),
        (
            ["algorithm=grpo", "algorithm.filter_groups=true", "algorithm.filter_metric=varity"],
            "did you mean   variety",
        ),
        (["algorithm=gvpo", "algorithm.correction=token"], "importance weights would break GVPO's zero sum"),
        (["algorithm=grpo", "rollout.group_size=1"], "it needs at least 2"),
        (
            ["algorithm=gdpo", "algorithm.overlong_buffer=4", "reward=[rewards.py:short,rewards.py:overlong]"],
            "rename yours",
        ),
        (["algorithm=ppo", "critic.model=nowhere"], "unknown model  nowhere"),
        (["algorithm=ppo", "algorithm.gamma=1.5"], "algorithm.gamma must be a number from 0 to 1, got 1.5"),
        (["algorithm=grpo", "algorithm.reject_below=2", "algorithm.reject_above=1"], "every sample would be rejected"),
        (["algorithm=grpo", "algorithm.overlong_buffer=9"], "is more than rollout.max_tokens=8"),
        (
            ["algorithm=dapo", "reward=[rewards.py:short,rewards.py:overlong]", "reward.weights.overlong=0"],
            "rename yours",
        ),
    ],
)
def test_mistakes_stop_before_the_start(
    tiny_model_folder: Path, settings: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"model={tiny_model_folder}", *SMALL, *settings]) == 2
    assert message in capsys.readouterr().err
    assert not Path("outputs").exists()


@pytest.mark.parametrize("name", ["gmpo", "raft", "dppo"])
def test_every_aggregation_is_listed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", name]) == 0
    text = " ".join(capsys.readouterr().out.replace("-\n", "-").split())
    _, _, after = text.partition("algorithm.aggregation=")
    explained = after.partition("algorithm.norm_length")[0].replace("- ", "-")
    assert "token-mean | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm" in explained

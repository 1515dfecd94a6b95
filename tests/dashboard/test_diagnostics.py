"""Each fault raises its own finding, and healthy runs have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from covey.algorithms import ALGORITHMS, settings
from covey.config import schema
from covey.dashboard import diagnostics
from covey.dashboard.diagnostics import Evidence, Finding, diagnose
from covey.dashboard.runs import Run
from covey.telemetry.base import flatten
from tests.dashboard.synthetic import FAULTS, MORE_FAULTS, Floats, faulty, healthy

RECORDED = Path(__file__).parent / "runs"


def evidence(series: Mapping[str, Floats], accuracy: Mapping[int, float], **more: Floats) -> Evidence:
    steps = {name: (np.arange(len(values)), np.asarray(values)) for name, values in series.items()}
    evals = {"eval/accuracy": (np.array(list(accuracy)), np.array(list(accuracy.values())))}
    return Evidence(steps, evals, 200, **more)


def found(series: Mapping[str, Floats], accuracy: Mapping[int, float], **more: Floats) -> list[str]:
    return [finding.name for finding in diagnose(evidence(series, accuracy, **more))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAULTS + MORE_FAULTS)
def test_each_fault_raises_its_finding_and_no_other(name: str, seed: int) -> None:
    assert found(*faulty(name, seed=seed)) == [name]


@pytest.mark.parametrize("steps", [12, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_have_no_findings(steps: int, seed: int) -> None:
    assert found(*healthy(steps, seed)) == []


@pytest.mark.parametrize("folder", sorted(RECORDED.iterdir()), ids=lambda folder: folder.name)
def test_recorded_runs_that_learned_have_no_findings(folder: Path) -> None:
    run = Run(0, folder, folder.name)
    run.opened = True
    run.poll()
    assert len(run.metrics.tables["step"]) >= diagnostics.MIN_STEPS
    assert run.findings() == []


def test_truncated_episodes_are_reported_with_their_limits_and_not_by_their_consequences() -> None:
    """Truncated episodes have equal rewards or none: neither zero variance nor a failure is reported."""
    series, accuracy = healthy()
    steps = len(series["groups/flat"])
    series |= {name: np.full(steps, value) for name, value in {"groups/flat": 1.0, "episodes/cut": 0.8}.items()}
    series |= {"episodes/failed": np.full(steps, 20.0), "episodes/failed/truncated": np.full(steps, 20.0)}
    ended = evidence(series, accuracy)
    # Written only in steps where some are: every fourth one has 0.8, the others 0.4 by each of two limits.
    others = np.setdiff1d(np.arange(steps), np.arange(0, steps, 4))
    ended.steps["episodes/cut/max_turns"] = (np.arange(steps), np.where(np.arange(steps) % 4, 0.4, 0.8))  # type: ignore[index]
    ended.steps["episodes/cut/max_tokens"] = (others, np.full(len(others), 0.4))  # type: ignore[index]
    (finding,) = diagnose(ended)
    assert finding.name == "truncation" and finding.settings[:2] == ("agent.max_turns", "rollout.max_tokens")
    assert "80% of the episodes end at a limit" in finding.sentence  # the end is 20 steps: five of 0.8, fifteen of 0.4
    assert "50% by agent.max_turns, 30% by rollout.max_tokens" in finding.sentence
    assert finding.advice.startswith("Raise agent.max_turns")


def test_short_runs_are_not_judged() -> None:
    series, accuracy = faulty("kl_growth")
    assert found({name: values[-9:] for name, values in series.items()}, accuracy) == []


def test_length_correlation_needs_correlated_episodes() -> None:
    series, accuracy = faulty("length_correlation")
    lengths = np.linspace(50, 300, 80)
    assert found(series, accuracy, lengths=lengths, rewards=lengths / 300) == ["length_correlation"]
    alternating = np.arange(80) % 2 * 1.0
    assert found(series, accuracy, lengths=lengths, rewards=alternating) == []


def test_low_entropy_is_fine_if_the_tasks_are_solved() -> None:
    series, accuracy = faulty("entropy_collapse")
    assert found(series, dict.fromkeys(accuracy, 0.95)) == []


def test_an_insignificant_drop_is_not_reward_hacking() -> None:
    """With 200 tasks two accuracies of 0.8 differ by √(2 · 0.8 · 0.2 / 200) = 0.04 by chance alone; with 10 by 0.18."""
    series, _ = healthy()
    series["reward/mean"] = 0.2 + 0.7 * np.linspace(0, 1, 100)
    fallen = {0: 0.2, 30: 0.8, 60: 0.65, 100: 0.65}
    whole = evidence(series, fallen)
    assert [finding.name for finding in diagnose(whole)] == ["reward_hacking"]
    few = Evidence(whole.steps, whole.evaluations, 10)
    assert diagnose(few) == []


def test_a_finding_names_metrics_and_steps() -> None:
    (finding,) = diagnose(evidence(*faulty("reward_hacking")))
    assert isinstance(finding, Finding) and finding.metrics == ("reward/mean", "eval/accuracy")
    assert 20 <= finding.first <= 40 and finding.last == 99
    (finding,) = diagnose(evidence(*faulty("failures")))
    assert "tool_timeout" in finding.sentence and "24%" in finding.sentence  # 20 of 84


def pulled(pull: Floats, spread: Floats, accuracy: float = 0.5, **settings: object) -> list[Finding]:
    series, _ = healthy(len(pull))
    series |= {"gvpo/pull": pull, "gvpo/reward_spread": spread, "gvpo/mean_log_ratio": np.full(len(pull), 7.0)}
    series["reward/mean"] = np.repeat([0.2, 0.4], len(pull) // 2)
    made = evidence(series, {0: 0.2, len(pull): accuracy})
    return diagnose(replace(made, settings={f"algorithm.{key}": value for key, value in settings.items()}))


def test_the_pull_of_the_anchor_is_reported_with_the_nats_used_and_paid_for() -> None:
    pull, spread = np.where(np.arange(100) < 60, 0.1, 0.5), np.full(100, 0.3)
    (finding,) = pulled(pull, spread, beta=0.05, reference="initial")
    assert (finding.name, finding.first, finding.last) == ("anchor_pull", 60, 99)
    assert "For 40 steps" in finding.sentence and "std(ρ) is 0.5 within groups" in finding.sentence
    assert "7.0 nats" in finding.sentence and "0.200, pays for 4.0 (gain / β, β = 0.05)" in finding.sentence
    assert "algorithm.beta" in finding.settings and "algorithm.reference=old" in finding.advice
    (other,) = pulled(pull, spread, beta=0.05, reference="moving")  # its anchor was not there at the start
    assert "7.0 nats" in other.sentence and "pays for" not in other.sentence


def test_a_pull_below_the_rewards_or_of_few_steps_is_fine() -> None:
    spread = np.full(100, 0.3)
    assert pulled(np.zeros(100), spread, beta=0.1, reference="old") == []  # one update per batch: ρ = 0
    assert pulled(np.full(100, 1e-7), np.zeros(100), beta=0.1, reference="old") == []  # nor where rewards are equal
    assert pulled(np.full(100, 0.2), spread) == []
    assert pulled(np.where(np.arange(100) < 96, 0.1, 0.5), spread) == []  # four steps
    assert pulled(np.where(np.arange(100) < 90, 0.5, 0.1), spread) == []  # it is over
    assert pulled(np.full(100, 0.5), spread, accuracy=0.95) == []  # solved: nothing is left to gain


def test_settings_of_findings_exist() -> None:
    known = set(flatten(_defaults()))
    of_algorithms = {f"algorithm.{key}" for name in ALGORITHMS for key in settings(name)} | {"algorithm.name"}
    named = {
        key
        for name in FAULTS + MORE_FAULTS
        for finding in diagnose(evidence(*faulty(name)))
        for key in finding.settings
    }
    missing = {key for key in named if key not in known | of_algorithms}
    assert not missing


def _defaults() -> dict[str, object]:
    import dataclasses

    return {
        section.name: {field.name: 0 for field in dataclasses.fields(kind)}
        for section in dataclasses.fields(schema.Config)
        if dataclasses.is_dataclass(kind := getattr(schema, f"{section.name.capitalize()}Config", None))
    }

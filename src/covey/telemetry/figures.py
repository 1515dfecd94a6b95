"""The few figures worth watching, each with half a line of plain words, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from covey.telemetry.base import RunInfo

ABSENT = "–"

Form = Literal["score", "number", "count", "share"]


@dataclass(frozen=True, slots=True)
class Figure:
    key: str
    label: str
    form: Form
    meaning: str  # at most 38 characters: fits beside the value on 60 columns


@dataclass(frozen=True, slots=True)
class Curve:
    """What a run is drawn by: a metric of its steps, and the same of unseen data."""

    name: str  # reward, loss
    key: str
    evaluations: Mapping[str, str]  # name of the kind of evaluation → metric
    best: str  # the metric that tells the best evaluation
    form: Form
    falls: bool  # whether less is better

    def measure(self, values: Iterable[float]) -> str:
        """What the best evaluations' numbers may be called: an accuracy only where all could be shares."""
        return "loss" if self.falls else "accuracy" if all(0 <= value <= 1 for value in values) else "reward"


def curve_of(kind: str, trained_reward: str) -> Curve:
    """`kind` is RunInfo's, and run.json's."""
    if kind == "sft":
        return Curve("loss", "sft/loss", {"validation": "eval/loss"}, "eval/loss", "number", falls=True)
    modes = {mode: f"eval/{mode}/{trained_reward}" for mode in ("greedy", "sampled")}
    return Curve("reward", "reward/mean", modes, "eval/accuracy", "score", falls=False)


def key_figures(info: RunInfo) -> tuple[tuple[Figure, ...], ...]:
    """From top to bottom, the most telling first. A row holds alternatives: the first one the run reports is shown."""
    if info.kind == "sft":
        return (
            (Figure("sft/loss", "loss", "number", "surprise per demonstrated token"),),
            (Figure("eval/loss", "eval loss", "number", "the same on unseen demonstrations"),),
            (Figure("eval/token_accuracy", "eval tokens", "share", "unseen tokens that would be said"),),
            (Figure("policy/entropy", "entropy", "number", "doubt per token"),),
            (Figure("grad/norm", "grad norm", "number", "force of the update; spikes are bad"),),
            (Figure("optim/lr", "lr", "number", "learning rate of this step"),),
            (Figure("sft/tokens", "tokens", "count", "learned from in this step"),),
        )
    reward = info.trained_reward
    return (
        (Figure("reward/mean", "reward", "score", "mean score of this step's answers"),),
        (Figure(f"eval/greedy/{reward}", "eval greedy", "score", "unseen tasks, likeliest answer"),),
        (Figure(f"eval/sampled/{reward}", "eval sampled", "score", "unseen tasks, random answers"),),
        (Figure("policy/entropy", "entropy", "number", "doubt per token; near 0: no exploring"),),
        (
            Figure("kl/reference", "KL", "number", "drift from the reference model"),
            Figure("gvpo/mean_log_ratio", "log-ratio", "number", "log-prob. gained over the reference"),
            Figure("policy/kl_old", "KL", "number", "drift from the policy that sampled"),
        ),
        (Figure("grad/norm", "grad norm", "number", "force of the update; spikes are bad"),),
        (Figure("response/length_mean", "length", "count", "tokens per answer"),),
        (Figure("response/truncated", "cut off", "share", "answers stopped by the length limit"),),
        (Figure("groups/flat", "flat groups", "share", "all answers score alike: no lesson"),),
    )


def is_stage(key: str) -> bool:
    """Whether a metric is the time of a stage. The other timings lie within stages, or are their sum."""
    others = ("timing/step", "timing/generation_time", "timing/tools", "timing/slowest_episode")
    return key.startswith("timing/") and key not in others


def by_the_machine(key: str) -> bool:
    """Whether a metric may differ between two runs with the same seed: times, speed, memory."""
    return key.startswith(("timing/", "perf/")) and key not in ("perf/generated_tokens", "perf/read_tokens")


def evaluation_form(key: str) -> Form:
    """How an eval/* metric reads: rewards are scores; what an evaluation counts beside them is not."""
    match key.rsplit("/", 1)[-1]:
        case "length_mean" | "failed" | "tokens" | "loss":
            return "number"
        case "truncated":
            return "share"
        case _:
            return "score"


def chosen(alternatives: tuple[Figure, ...], metrics: Mapping[str, object]) -> Figure:
    return next((figure for figure in alternatives if figure.key in metrics), alternatives[0])


def show(value: float | None, form: Form) -> str:
    if value is None or value != value:
        return ABSENT
    match form:
        case "score":
            return f"{value:.3f}"
        case "count":
            return f"{value:.0f}"
        case "share":
            return f"{100 * value:.0f}%"
        case "number":
            return f"{value + 0.0:.3g}"  # no minus before a zero


def duration(seconds: float | None) -> str:
    """As people say it: 4.2s, 48s, 2m10s, 3h05m, 1d02h."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"

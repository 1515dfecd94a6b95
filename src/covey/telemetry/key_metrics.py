"""The metrics that the console highlights, the curve of a run, and how numbers are formatted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from covey.telemetry.base import RunInfo

ABSENT = "–"

Format = Literal["score", "number", "count", "share"]


@dataclass(frozen=True, slots=True)
class KeyMetric:
    key: str
    label: str
    format: Format
    meaning: str  # at most 38 characters: fits beside the value on 60 columns


@dataclass(frozen=True, slots=True)
class Curve:
    """The learning curve of a run: a metric of its steps, and the same on held-out data."""

    name: str  # reward or loss
    key: str
    evaluations: Mapping[str, str]  # kind of evaluation → metric
    best: str  # the metric that selects the best evaluation
    format: Format
    falls: bool  # lower is better

    def measure(self, values: Iterable[float]) -> str:
        """What to call evaluation values. They are an accuracy only if all lie in [0, 1]."""
        return "loss" if self.falls else "accuracy" if all(0 <= value <= 1 for value in values) else "reward"


def curve_of(kind: str, trained_reward: str) -> Curve:
    """`kind` as in RunInfo and run.json."""
    if kind == "sft":
        return Curve("loss", "sft/loss", {"validation": "eval/loss"}, "eval/loss", "number", falls=True)
    modes = {mode: f"eval/{mode}/{trained_reward}" for mode in ("greedy", "sampled")}
    return Curve("reward", "reward/mean", modes, "eval/accuracy", "score", falls=False)


def key_metrics(info: RunInfo) -> tuple[tuple[KeyMetric, ...], ...]:
    """From most to least important. A row holds alternatives: the first one that the run reports is shown."""
    if info.kind == "sft":
        return (
            (KeyMetric("sft/loss", "loss", "number", "−log π per demonstrated token"),),
            (KeyMetric("eval/loss", "eval loss", "number", "the same on held-out demonstrations"),),
            (KeyMetric("eval/token_accuracy", "eval tokens", "share", "held-out tokens ranked first"),),
            (KeyMetric("policy/entropy", "entropy", "number", "uncertainty per token"),),
            (KeyMetric("grad/norm", "grad norm", "number", "size of the gradient; spikes are bad"),),
            (KeyMetric("optim/lr", "lr", "number", "learning rate of this step"),),
            (KeyMetric("sft/tokens", "tokens", "count", "trained on in this step"),),
        )
    reward = info.trained_reward
    return (
        (KeyMetric("reward/mean", "reward", "score", "mean reward of this step's episodes"),),
        (KeyMetric(f"eval/greedy/{reward}", "eval greedy", "score", "held-out tasks, greedy decoding"),),
        (KeyMetric(f"eval/sampled/{reward}", "eval sampled", "score", "held-out tasks, sampled answers"),),
        (KeyMetric("policy/entropy", "entropy", "number", "per token; near 0: no exploration"),),
        (
            KeyMetric("kl/reference", "KL", "number", "distance from the reference model"),
            KeyMetric("gvpo/mean_log_ratio", "log-ratio", "number", "log-prob gained over the reference"),
            KeyMetric("policy/kl_old", "KL", "number", "distance from the sampling policy"),
        ),
        (KeyMetric("grad/norm", "grad norm", "number", "size of the gradient; spikes are bad"),),
        (KeyMetric("response/length_mean", "length", "count", "tokens per answer"),),
        (KeyMetric("response/truncated", "truncated", "share", "answers stopped by the length limit"),),
        (KeyMetric("groups/flat", "zero var.", "share", "groups whose rewards are all equal"),),
    )


def first_reported(alternatives: tuple[KeyMetric, ...], metrics: Mapping[str, object]) -> KeyMetric:
    return next((metric for metric in alternatives if metric.key in metrics), alternatives[0])


def is_stage(key: str) -> bool:
    """Whether a metric is the time of a stage. Other timings lie within stages or are their sum."""
    others = ("timing/step", "timing/generation_time", "timing/tools", "timing/slowest_episode")
    return key.startswith("timing/") and key not in others


def is_machine_dependent(key: str) -> bool:
    """Whether a metric may differ between two runs with the same seed: times, speed, memory."""
    return key.startswith(("timing/", "perf/")) and key not in ("perf/generated_tokens", "perf/read_tokens")


def evaluation_format(key: str) -> Format:
    """How to format an eval/* metric: rewards are scores, unlike the counts beside them."""
    match key.rsplit("/", 1)[-1]:
        case "length_mean" | "failed" | "tokens" | "loss":
            return "number"
        case "truncated":
            return "share"
        case _:
            return "score"


def format_value(value: float | None, form: Format) -> str:
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
            return f"{value + 0.0:.3g}"  # + 0.0: no minus sign on zero


def format_duration(seconds: float | None) -> str:
    """4.2s, 48s, 2m10s, 3h05m, 1d02h."""
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

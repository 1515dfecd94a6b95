"""The results of an evaluation: a table on the console, results.md, and results.json for programs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from covey.evaluation.scores import SIGNIFICANCE, Comparison, Scores, format_p, sentence
from covey.evaluation.statistics import Estimate
from covey.telemetry.key_metrics import ABSENT
from covey.telemetry.report import block, plain

_NOTES = (
    "In per cent, with 95 % confidence intervals over tasks. pass@1: share of right answers, over all n; pass@k: "
    "chance that one of k answers is right; maj@n: share of tasks whose most frequent answer is right; tokens: mean "
    "length of an answer; 90 %: nine of ten are no longer; cut off: stopped by the length limit."
)


@dataclasses.dataclass(frozen=True)
class Report:
    scores: Sequence[Scores]
    comparisons: Sequence[Comparison]
    command: str

    def as_data(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "results": [_data(scores) for scores in self.scores],
            "comparisons": [dataclasses.asdict(comparison) for comparison in self.comparisons],
        }

    def as_markdown(self) -> str:
        head, rows = self._score_table()
        parts = ["# Evaluation", block(self.command), _markdown(head, rows), _NOTES]
        if failed := self.failures():
            parts.append("\n".join(f"- {plain(line)}" for line in failed))
        if self.comparisons:
            sentences = "\n".join(f"- {plain(sentence)}" for sentence in self.sentences())
            parts += ["## Comparison", _markdown(*self._comparison_table()), sentences]
        return "\n\n".join(parts) + "\n"

    def show(self, console: Console) -> None:
        console.print(_table(*self._score_table()))
        for line in self.failures():
            console.print(f"warning: {line}", markup=False, soft_wrap=True)
        if self.comparisons:
            console.print()
            console.print(_table(*self._comparison_table()))
            for line in self.sentences():
                console.print(line, markup=False, soft_wrap=True)

    def failures(self) -> list[str]:
        """One line for each model, task and mode with answers that were not scored."""
        lines = []
        for scores in self.scores:
            lost, spec = sum(scores.failures.values()), scores.spec
            if lost:
                causes = ", ".join(f"{count} {cause}" for cause, count in scores.failures.items())
                lines.append(
                    f"{self._names[spec.model]} on {spec.task}: {lost} of {scores.answers + lost} {spec.mode} "
                    f"answers were not scored and do not count ({causes}); "
                    f"one of them: {scores.example or 'the reward returned None'}"
                )
        return lines

    def sentences(self) -> list[str]:
        sentences = [sentence(comparison, self._names) for comparison in self.comparisons]
        if len(sentences) > 1:
            sentences.append(
                f"{len(sentences)} comparisons are made: if no models differed, about one in {1 / SIGNIFICANCE:.0f} "
                f"would still come out below p = {SIGNIFICANCE}; the p-values are not corrected for that."
            )
        return sentences

    @property
    def _names(self) -> dict[str, str]:
        return short_names(list(dict.fromkeys(scores.spec.model for scores in self.scores)))

    def _score_table(self) -> tuple[list[str], list[list[str]]]:
        """One row per model, task and mode. Columns without any value are omitted."""
        ks = sorted({k for scores in self.scores for k in scores.pass_at if k > 1})
        several = any(scores.spec.n > 1 for scores in self.scores)
        with_mean = any(scores.average != scores.pass_at.get(1) for scores in self.scores)
        with_maj = several and any(scores.maj is not None for scores in self.scores)
        head = ["task", "model", "sampling", "tasks", "pass@1"] + ["mean reward"] * with_mean
        head += [f"pass@{k}" for k in ks] + ["maj@n"] * with_maj + ["tokens", "90 %", "cut off"]
        rows = []
        for scores in self.scores:
            spec, lengths = scores.spec, scores.lengths
            mode = spec.mode if spec.n == 1 else f"{spec.mode} × {spec.n}"
            row = [spec.task, self._names[spec.model], mode, str(scores.tasks), _percent(scores.pass_at.get(1))]
            row += [_number(scores.average)] * with_mean + [_percent(scores.pass_at.get(k)) for k in ks]
            row += [_percent(scores.maj if spec.n > 1 else None)] * with_maj
            row += (
                [ABSENT] * 3
                if lengths is None
                else [f"{lengths.mean:.0f}", f"{lengths.p90:.0f}", f"{lengths.truncated:.0%}"]
            )
            rows.append(row)
        return head, rows

    def _comparison_table(self) -> tuple[list[str], list[list[str]]]:
        head = ["task", "figure", "first → second", "values", "difference", "better / worse", "p"]
        rows = []
        for c in self.comparisons:
            shares = c.metric.startswith("pass")
            one, two = (f"{100 * x:.1f}" if shares else f"{x:.3f}" for x in (c.first_value, c.second_value))
            scaled = _scale(c.difference, 100 if shares else 1)
            change = f"{scaled.value:+.3g} [{scaled.low:+.3g}, {scaled.high:+.3g}]"
            pair = f"{self._names[c.first]} → {self._names[c.second]}"
            sides = f"{c.second_only} / {c.first_only}"
            rows.append([c.task, f"{c.metric}, {c.mode}", pair, f"{one} → {two}", change, sides, format_p(c.p)])
        return head, rows


def flat_metrics(all_scores: Sequence[Scores]) -> dict[str, float]:
    """The scores of one model on its own tasks, under the names that a run logs."""
    metrics: dict[str, float] = {}
    for scores in all_scores:
        mode, lengths = scores.spec.mode, scores.lengths
        metrics |= {f"eval/{mode}/{name}": value for name, value in scores.rewards.items()}
        if lengths is not None:
            metrics |= {f"eval/{mode}/length_mean": lengths.mean, f"eval/{mode}/truncated": lengths.truncated}
        if scores.failures:
            metrics[f"eval/{mode}/failed"] = float(sum(scores.failures.values()))
    first = f"eval/{all_scores[0].spec.mode}/{all_scores[0].spec.reward}"
    return metrics | ({"eval/accuracy": metrics[first]} if first in metrics else {})


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Paths without their common prefix: `outputs/2026-01-31/14-05-09` becomes `14-05-09`."""
    if len(models) < 2 or not all("/" in model for model in models):
        return {model: model for model in models}
    alike = len({os.path.isabs(model) for model in models}) == 1
    parents = os.path.commonpath([os.path.dirname(model) for model in models]) if alike else ""
    return {model: os.path.relpath(model, parents) if parents else model for model in models}


def _data(scores: Scores) -> dict[str, Any]:
    spec = scores.spec

    def data(estimate: Estimate | None) -> dict[str, float] | None:
        return None if estimate is None else dataclasses.asdict(estimate)

    return {
        "model": spec.model,
        "task": spec.task,
        "mode": spec.mode,
        "n": spec.n,
        "reward": spec.reward,
        "right_from": spec.threshold,
        "tasks": scores.tasks,
        "answers": scores.answers,
        **{f"pass@{k}": data(estimate) for k, estimate in scores.pass_at.items()},
        f"avg@{spec.n}": data(scores.average),
        f"maj@{spec.n}": data(scores.maj),
        "rewards": dict(scores.rewards),
        "tokens": None if scores.lengths is None else dataclasses.asdict(scores.lengths),
        "failures": dict(scores.failures),
    }


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return ABSENT
    scaled = _scale(estimate, 100)
    return f"{scaled.value:.1f} [{scaled.low:.1f}, {scaled.high:.1f}]"


def _number(estimate: Estimate | None) -> str:
    return ABSENT if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _scale(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(factor * estimate.value, factor * estimate.low, factor * estimate.high)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [map(plain, head), ["---"] * len(head), *(map(plain, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the console, with intervals below their values to save width."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text(cell.replace(" [", "\n[")) for cell in row))
    return table

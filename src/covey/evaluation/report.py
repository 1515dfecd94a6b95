"""Figures as people read them: a table on the screen, results.md, and results.json for programs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from covey.evaluation.figures import SURE, Comparison, Figures, p_text, sentence
from covey.evaluation.statistics import Estimate
from covey.telemetry.report import block, plain

ABSENT = "–"


@dataclasses.dataclass(frozen=True)
class Report:
    figures: Sequence[Figures]
    comparisons: Sequence[Comparison]
    command: str

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(found.subject.model for found in self.figures))

    def as_data(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "results": [_data(found) for found in self.figures],
            "comparisons": [dataclasses.asdict(found) for found in self.comparisons],
        }

    def as_markdown(self) -> str:
        head, rows = self._cells()
        parts = ["# Evaluation", block(self.command), _markdown(head, rows), _NOTES]
        if failed := self.failures():
            parts.append("\n".join(f"- {plain(line)}" for line in failed))
        if self.comparisons:
            sentences = "\n".join(f"- {plain(sentence)}" for sentence in self.sentences())
            parts += ["## Side by side", _markdown(*self._compared()), sentences]
        return "\n\n".join(parts) + "\n"

    def show(self, console: Console) -> None:
        console.print(_table(*self._cells()))
        for line in self.failures():
            console.print(f"warning: {line}", markup=False, soft_wrap=True)
        if self.comparisons:
            console.print()
            console.print(_table(*self._compared()))
            for line in self.sentences():
                console.print(line, markup=False, soft_wrap=True)

    def failures(self) -> list[str]:
        """What was not scored, one line for each measurement that lost something."""
        lines = []
        for found in self.figures:
            lost, subject = sum(found.failures.values()), found.subject
            if lost:
                lines.append(
                    f"{self._names[subject.model]} on {subject.task}: {lost} of {found.answers + lost} {subject.mode} "
                    f"answers were not scored and do not count ({_listed(found.failures)}); "
                    f"one of them: {found.example or 'the reward returned None'}"
                )
        return lines

    def sentences(self) -> list[str]:
        found = [sentence(one, self._names) for one in self.comparisons]
        if len(found) > 1:
            found.append(
                f"{len(found)} comparisons are made: where nothing differs at all, about one in {1 / SURE:.0f} would "
                f"still come out below p = {SURE}; the p-values are not corrected for that."
            )
        return found

    @property
    def _names(self) -> dict[str, str]:
        return short_names(self.models)

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """One row per model, task and mode. What no row has is no column."""
        ks = sorted({k for found in self.figures for k in found.pass_at if k > 1})
        several = any(found.subject.n > 1 for found in self.figures)
        scaled = any(found.average != found.pass_at.get(1) for found in self.figures)
        voted = several and any(found.maj is not None for found in self.figures)
        head = ["task", "model", "sampling", "tasks", "pass@1"]
        head += ["mean reward"] * scaled + [f"pass@{k}" for k in ks] + ["maj@n"] * voted + ["tokens", "90 %", "cut off"]
        rows = []
        for found in self.figures:
            subject, lengths = found.subject, found.lengths
            mode = subject.mode if subject.n == 1 else f"{subject.mode} × {subject.n}"
            row = [subject.task, self._names[subject.model], mode, str(found.tasks), _share(found.pass_at.get(1))]
            row += [_number(found.average)] * scaled + [_share(found.pass_at.get(k)) for k in ks]
            row += [_share(found.maj if subject.n > 1 else None)] * voted
            row += (
                ["–"] * 3
                if lengths is None
                else [f"{lengths.mean:.0f}", f"{lengths.p90:.0f}", f"{lengths.truncated:.0%}"]
            )
            rows.append(row)
        return head, rows

    def _compared(self) -> tuple[list[str], list[list[str]]]:
        head = ["task", "figure", "first → second", "values", "difference", "better / worse", "p"]
        rows = []
        for found in self.comparisons:
            shares = found.metric.startswith("pass")
            one, two = (f"{100 * x:.1f}" if shares else f"{x:.3f}" for x in (found.first_value, found.second_value))
            scaled = _times(found.difference, 100 if shares else 1)
            change = f"{scaled.value:+.3g} [{scaled.low:+.3g}, {scaled.high:+.3g}]"
            pair = f"{self._names[found.first]} → {self._names[found.second]}"
            sides = f"{found.second_only} / {found.first_only}"
            figure = f"{found.metric}, {found.mode}"
            rows.append([found.task, figure, pair, f"{one} → {two}", change, sides, p_text(found.p)])
        return head, rows


_NOTES = (
    "In per cent, with 95 % confidence intervals over tasks. pass@1: share of right answers, over all n; pass@k: "
    "chance that one of k answers is right; maj@n: share of tasks whose most frequent answer is right; tokens: mean "
    "length of an answer; 90 %: nine of ten are no longer; cut off: stopped by the length limit."
)


def flat_metrics(found: Sequence[Figures]) -> dict[str, float]:
    """The figures of one model on its own tasks, under the names that a run logs."""
    metrics: dict[str, float] = {}
    for one in found:
        mode, lengths = one.subject.mode, one.lengths
        metrics |= {f"eval/{mode}/{name}": value for name, value in one.rewards.items()}
        if lengths is not None:
            metrics |= {f"eval/{mode}/length_mean": lengths.mean, f"eval/{mode}/truncated": lengths.truncated}
        if one.failures:
            metrics[f"eval/{mode}/failed"] = float(sum(one.failures.values()))
    first = f"eval/{found[0].subject.mode}/{found[0].subject.reward}"
    return metrics | ({"eval/accuracy": metrics[first]} if first in metrics else {})


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Paths without what they all begin with: `outputs/2026-01-31/14-05-09` among its like is `14-05-09`."""
    if len(models) < 2 or not all("/" in model for model in models):
        return {model: model for model in models}
    parents = os.path.commonpath([os.path.dirname(model) for model in models]) if _alike(models) else ""
    return {model: os.path.relpath(model, parents) if parents else model for model in models}


def _alike(models: Sequence[str]) -> bool:
    return len({os.path.isabs(model) for model in models}) == 1


def _data(found: Figures) -> dict[str, Any]:
    subject = found.subject
    return {
        "model": subject.model,
        "task": subject.task,
        "mode": subject.mode,
        "n": subject.n,
        "reward": subject.reward,
        "right_from": subject.bar,
        "tasks": found.tasks,
        "answers": found.answers,
        **{f"pass@{k}": _estimate(estimate) for k, estimate in found.pass_at.items()},
        f"avg@{subject.n}": _estimate(found.average),
        f"maj@{subject.n}": _estimate(found.maj),
        "rewards": dict(found.rewards),
        "tokens": None if found.lengths is None else dataclasses.asdict(found.lengths),
        "failures": dict(found.failures),
    }


def _estimate(found: Estimate | None) -> dict[str, float] | None:
    return None if found is None else dataclasses.asdict(found)


def _share(found: Estimate | None) -> str:
    if found is None:
        return ABSENT
    scaled = _times(found, 100)
    return f"{scaled.value:.1f} [{scaled.low:.1f}, {scaled.high:.1f}]"


def _number(found: Estimate | None) -> str:
    return ABSENT if found is None else f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _times(found: Estimate, factor: float) -> Estimate:
    return Estimate(factor * found.value, factor * found.low, factor * found.high)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in counts.items())


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [map(plain, head), ["---"] * len(head), *(map(plain, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Intervals stand below their figures, so that many columns fit."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in head:
        table.add_column(name)
    for row in rows:
        table.add_row(*(Text(cell.replace(" [", "\n[")) for cell in row))
    return table

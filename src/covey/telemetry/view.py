"""The live view: one screen that says what runs, whether it learns, and what the numbers mean.

Every section is a list of lines, so that the view can be cut to the terminal: what matters least goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import RLock

from rich.console import Console, ConsoleOptions
from rich.text import Text

from covey.telemetry.base import EpisodeView
from covey.telemetry.figures import chosen, duration, show
from covey.telemetry.state import RunState
from covey.telemetry.textplot import Marks, plot, sparkline

TRAINING = "cyan"
EVALUATION = {"greedy": ("●", "green"), "sampled": ("○", "yellow"), "validation": ("●", "green")}
STAGE_STYLES = (("█", "cyan"), ("▓", "magenta"), ("▒", "yellow"), ("░", "green"))
WARNINGS = 3  # kept on the screen
WIDE = 84  # columns from which the figures have room for their recent course


class LiveView:
    """Draws a `RunState`. The terminal is redrawn from another thread: hold `lock` while changing what it draws."""

    def __init__(self, state: RunState, now: Callable[[], float]) -> None:
        self.lock = RLock()
        self.state = state
        self.stage: str | None = None
        self.progress: tuple[int, int, str] | None = None
        self.status = "running"
        self._now = now
        self._since = now()

    def enter(self, stage: str | None) -> None:
        self.stage, self.progress, self._since = stage, None, self._now()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        with self.lock:
            for line in self.lines(console, options.max_width, console.size.height - 1):
                line.truncate(options.max_width, overflow="ellipsis")
                yield line

    def lines(self, console: Console, width: int, height: int) -> list[Text]:
        rows = self._plan(height)
        sections = (
            self._header(width),
            self._curve(width, rows["curve"]),
            self._figures(width, rows["figures"]),
            self._time(width, rows["time"]),
            self._warnings(width, rows["warnings"]),
            self._sample(console, width, rows["sample"]),
        )
        return [line for section in sections for line in section]

    def _plan(self, height: int) -> dict[str, int]:
        """Rows per section, its title included. Too few: cut to the bone, then left out, the least important first."""
        figures = 1 + len(self._figure_rows())
        warnings = min(len(self.state.warnings), WARNINGS)
        rows = {
            "header": 4,
            "curve": 10,
            "figures": figures,
            "time": 3 if self.state.timings else 0,
            "warnings": warnings + 1 if warnings else 0,
            "sample": 8 if self.state.sample else 0,
        }
        for name, least in (("sample", 5), ("curve", 7), ("figures", 6), ("sample", 0), ("time", 0), ("curve", 0)):
            missing = sum(rows.values()) - height
            if missing > 0:
                rows[name] = min(rows[name], max(least, rows[name] - missing) if least else 0)
        for name, most in (("figures", figures), ("curve", 13), ("sample", 14 if rows["sample"] else 0)):
            spare = height - sum(rows.values())
            if spare > 0 and rows[name]:
                rows[name] = min(most, rows[name] + spare)
        return rows

    def _header(self, width: int) -> list[Text]:
        state, info = self.state, self.state.info
        share = min(state.done / max(info.total_steps, 1), 1.0)
        eta = state.eta() if self.status == "running" else None
        left = f"  {duration(eta)} left" if eta is not None else ""
        count = f"step {state.done}/{info.total_steps}  "
        tail = f"  {100 * share:3.0f}%{left}"
        bar = max(width - len(count) - len(tail), 4)
        full = round(share * bar)
        progress = Text(count, no_wrap=True)
        progress.append("━" * full, style=TRAINING).append("─" * (bar - full), style="dim").append(tail)
        return [
            Text.assemble((info.title, "bold"), (f"  {info.folder}", "dim")),
            Text.assemble(
                *((info.algorithm, "bold"), " trains ", (info.model, "bold"), " on ", (info.task, "bold")),
                info.scored_by,
            ),
            progress,
            self._running(width),
        ]

    def _running(self, width: int) -> Text:
        if self.status != "running":
            return Text(self.status, style="bold green" if self.status == "finished" else "bold red")
        text = Text.assemble(("now  ", "dim"), (self.stage or "between stages", "bold"))
        if self.progress:
            done, total, what = self.progress
            text.append(f"  {done}/{total} {what}")
        if self.stage:
            text.append(f"  {duration(self._now() - self._since)}", style="dim")
        if speed := self.state.metrics.get("perf/tokens_per_second"):
            text.append(f"  {speed:,.0f} tokens/s".rjust(width - len(text)))
        return text

    def _curve(self, width: int, rows: int) -> list[Text]:
        if not rows:
            return []
        title = Text(f" {self.state.curve.name}  ", style="bold").append("⠤⠒ training", style=f"not bold {TRAINING}")
        marks: list[Marks] = []
        for mode, points in self.state.evaluations.items():
            glyph, style = EVALUATION[mode]
            if points:
                marks.insert(0, Marks(glyph, style, points))  # the first is drawn last, on top
                title.append(f"  {glyph} eval {mode}", style=f"not bold {style}")
        end = self.state.info.total_steps
        drawn = plot(self.state.training, marks, x_end=end, width=width, height=rows - 1, style=TRAINING)
        return [_rule(title, width), *drawn]

    def _figure_rows(self) -> list[tuple[str, str, str, str]]:
        """Label, value, recent course, meaning. What the run has not reported after its first step is left out."""
        state, found = self.state, []
        for alternatives in state.figures:
            figure = chosen(alternatives, state.metrics)
            if figure.key in state.metrics or not state.metrics:
                value = show(state.metrics.get(figure.key), figure.form)
                found.append((figure.label, value, sparkline(state.series[figure.key], 12), figure.meaning))
        return found

    def _figures(self, width: int, rows: int) -> list[Text]:
        lines = [_rule(Text(" key figures", style="bold"), width)]
        for label, value, course, meaning in self._figure_rows()[: max(rows - 1, 0)]:
            text = Text(f"{label:<12}").append(f"{value:>7}  ", style="bold")
            if width >= WIDE:
                text.append(f"{course:<14}", style=TRAINING)
            lines.append(text.append(meaning, style="dim"))
        return lines

    def _time(self, width: int, rows: int) -> list[Text]:
        stages = self.state.stage_seconds()
        total = sum(stages.values())
        if not rows or not total:
            return []
        title = Text(" time per step  ", style="bold").append(duration(total), style="not bold")
        if "timing/evaluate" in self.state.metrics:
            title.append(f"  (an evaluation {duration(self.state.metrics['timing/evaluate'])})", style="not bold dim")
        bar, legend, before = Text(), Text(), 0.0
        for (name, seconds), (glyph, style) in zip(_longest(stages), STAGE_STYLES, strict=False):
            end = before + seconds
            bar.append(glyph * (round(end / total * width) - round(before / total * width)), style=style)
            legend.append(f"{glyph} ", style=style).append(f"{name} {duration(seconds)} ")
            legend.append(f"{100 * seconds / total:.0f}%   ", style="dim")
            before = end
        legend.rstrip()
        return [_rule(title, width), bar, legend]

    def _warnings(self, width: int, rows: int) -> list[Text]:
        if not rows:
            return []
        count = len(self.state.warnings)
        title = Text(f" warnings ({count})" if count > WARNINGS else " warnings", style="bold yellow")
        newest = self.state.warnings[-WARNINGS:]
        return [_rule(title, width), *(Text(f"! {_one_line(text)}", style="yellow") for text in newest)]

    def _sample(self, console: Console, width: int, rows: int) -> list[Text]:
        sample = self.state.sample
        if sample is None or not rows:
            return []
        title = Text(f" one answer of {self.state.sample_from}  ", style="bold")
        title.append(f"reward {show(sample.reward, 'score')}", style="not bold green")
        if sample.advantage is not None:
            title.append(f"  advantage {sample.advantage:+.3f}", style="not bold magenta")
        lines = [_rule(title, width), *_dialogue(console, sample, width, rows - 1)]
        # Answers differ in length, the screen does not: what stands below the view stays where it is.
        return lines + [Text()] * (rows - len(lines)) if self.status == "running" else lines


def _longest(stages: dict[str, float]) -> list[tuple[str, float]]:
    """As many stages as have a style; the shortest are put together."""
    found, most = list(stages.items()), len(STAGE_STYLES)
    if len(found) <= most:
        return found
    return [*found[: most - 1], ("other", sum(seconds for _, seconds in found[most - 1 :]))]


def _dialogue(console: Console, sample: EpisodeView, width: int, rows: int) -> list[Text]:
    """Question, reply and expected answer in at most `rows` lines; the question gives way to the reply."""
    expected = [] if sample.answer is None else [("expected", sample.answer, "dim", 1)]
    room = rows - len(expected)
    question = max(1, min(room // 2, 4))
    parts = [("question", sample.question, "", question), ("reply", sample.reply, "bold", room - question), *expected]
    lines = []
    for label, text, style, most in parts:
        wrapped = Text(_one_line(text), style=style).wrap(console, max(width - 10, 10))
        if len(wrapped) > most > 0:
            wrapped[most - 1].rstrip()
            wrapped[most - 1].append(" …")
        for index, line in enumerate(wrapped[:most]):
            head = f"{label if index == 0 else '':<10}"
            lines.append(Text.assemble((head, "dim"), line))
    return lines


def _rule(title: Text, width: int) -> Text:
    """`── title ─────`"""
    rest = " " + "─" * max(width - title.cell_len - 3, 0)
    return Text.assemble(("──", "dim"), title, (rest, "dim"))


def _one_line(text: str) -> str:
    """Line breaks made visible; what could steer the terminal (a model may print anything) replaced."""
    shown = text.strip().replace("\n", " ⏎ ").replace("\t", " ")
    return "".join(char if char.isprintable() else "·" for char in shown)

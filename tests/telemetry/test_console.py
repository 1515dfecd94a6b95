"""The consoles: exact lines of the plain one, the contents of the live view, and the output in a notebook."""

from __future__ import annotations

import io
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import covey
from covey.config.schema import LoggingConfig
from covey.telemetry import EpisodeView, RunInfo, Telemetry
from covey.telemetry.console import LiveConsole, PlainConsole, Screen, open_console
from covey.telemetry.history import History, Record, RunState
from covey.telemetry.key_metrics import format_duration, format_value, key_metrics
from covey.telemetry.live_view import LiveView, Marks, nice_range, plot, sparkline
from tests.trainer.conftest import ROWS, SMALL, vowels

STEP = {
    "reward/mean": 0.5312,
    "policy/entropy": 1.234,
    "gvpo/mean_log_ratio": -0.125,
    "grad/norm": 0.8,
    "response/length_mean": 34.4,
    "response/truncated": 0.04,
    "groups/flat": 0.25,
    "perf/tokens_per_second": 412.4,
    "timing/rollout": 3.0,
    "timing/update": 1.0,
    "timing/step": 4.0,
}
EVALUATION = {
    "eval/accuracy": 0.25,
    "eval/greedy/sorted": 0.25,
    "eval/greedy/length_mean": 30.0,
    "eval/greedy/truncated": 0.0,
    "eval/sampled/sorted": 0.125,
    "timing/evaluate": 8.13,
}
SAMPLE = EpisodeView("Sort: 3 1 2", "1 2 3", reward=1.0, advantage=0.42, answer="1 2 3")


def test_plain_lines(info: RunInfo) -> None:
    out = io.StringIO()
    console = PlainConsole(RunState(info), out)
    console.step(0, STEP, SAMPLE, [])
    console.evaluation(1, EVALUATION, SAMPLE)
    console.step(1, {"reward/mean": 0.75}, None, [])
    console.note("saved a checkpoint")
    console.warn("group size 2 is small")
    console.close("interrupted")
    assert out.getvalue().splitlines() == [
        "sort-gvpo: gvpo trains smollm2-135m on sort, rewards sorted, sorted/lenient, 40 steps",
        f"writing to {info.folder}",
        "step   1/40  reward 0.531  eval     –  entropy  1.23  grad   0.8    412 tok/s  eta 2m36s",
        "eval   1/40  accuracy 0.250  greedy/sorted 0.250  sampled/sorted 0.125  took 8.1s",
        "step   2/40  reward 0.750  eval 0.250  entropy     –  grad     –      – tok/s  eta 2m32s",
        "saved a checkpoint",
        "warning: group size 2 is small",
        "interrupted after 2 of 40 steps",
    ]


def test_a_pipe_gets_lines_without_colour_or_carriage_returns(
    info: RunInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = Telemetry.open(info, LoggingConfig(), metrics_offset=None, episodes_offset=None)
    telemetry.step(0, STEP, SAMPLE, [])
    telemetry.close("finished")
    out = capsys.readouterr().out
    assert out.count("\n") == 4
    assert "\x1b" not in out
    assert "\r" not in out


def test_a_resumed_console_knows_the_history(info: RunInfo) -> None:
    out = io.StringIO()
    history = History((Record(0, STEP), Record(1, STEP)), (Record(0, EVALUATION),))
    console = PlainConsole(RunState(replace(info, first_step=2), history), out)
    console.step(2, {"reward/mean": 0.5}, None, [])
    assert "continuing after step 2" in out.getvalue()
    assert out.getvalue().splitlines()[-1].startswith("step   3/40  reward 0.500  eval 0.250 ")


def test_verbosity_warning_prints_only_warnings(info: RunInfo, capsys: pytest.CaptureFixture[str]) -> None:
    logging = LoggingConfig(verbosity="warning")
    telemetry = Telemetry.open(info, logging, metrics_offset=None, episodes_offset=None)
    telemetry.step(0, STEP, None, [])
    telemetry.warn("look here")
    telemetry.close("finished")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "warning: look here\n")


def test_a_closed_terminal_or_a_missing_character_does_not_end_the_run(info: RunInfo) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    PlainConsole(RunState(info), Gone()).step(0, STEP, None, [])

    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, encoding="ascii")
    PlainConsole(RunState(info), narrow).step(0, STEP, None, [])
    assert b"eval     ?  entropy  1.23" in raw.getvalue()


def test_which_console_is_opened(info: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    live = open_console(info, "info", History())
    live.close("finished")
    assert isinstance(live, LiveConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_console(info, "info", History()), PlainConsole)


def rendered(info: RunInfo, feed: Callable[[LiveView], None], width: int, height: int = 60) -> list[str]:
    console = Console(record=True, width=width, height=height, file=io.StringIO(), force_terminal=True)
    now = [0.0]
    view = LiveView(RunState(info), lambda: now[0])
    feed(view)
    now[0] += 4.2
    console.print(view)
    return console.export_text().splitlines()


def full(view: LiveView) -> None:
    view.state.add_evaluation(0, EVALUATION, None)
    for index in range(10):
        view.state.add_step(index, STEP | {"reward/mean": 0.06 * index}, SAMPLE)
    view.state.warnings += ["one", "two", "three", "four"]
    view.enter("rollout")
    view.progress = (37, 64, "episodes")


@pytest.mark.parametrize("width", [60, 100])
def test_the_live_view_fits_the_terminal(info: RunInfo, width: int) -> None:
    lines = rendered(info, full, width)
    text = "\n".join(lines)
    assert max(len(line) for line in lines) <= width
    assert "gvpo trains smollm2-135m on sort" in text
    assert "step 10/40" in text
    assert "25%  2m00s left" in text  # 30 steps of 4 s
    assert "now  rollout  37/64 episodes  4.2s" in text
    assert "412 tokens/s" in text
    assert "time per step  4.0s  (an evaluation 8.1s)" in text
    assert "█ rollout 3.0s 75%   ▓ update 1.0s 25%" in text
    assert "reward 1.000  advantage +0.420" in text
    assert "question  Sort: 3 1 2" in text
    assert "expected  1 2 3" in text
    figures = {line.split("  ")[0]: line for line in lines}
    assert "0.540" in figures["reward"]
    assert "mean reward of this step's episodes" in figures["reward"]
    assert "0.250" in figures["eval greedy"]
    assert "-0.125" in figures["log-ratio"]
    assert "4%" in figures["truncated"]


def test_the_time_of_a_step_is_that_of_its_stages(info: RunInfo) -> None:
    """9 + 3 + 1 + 0.5 + 0.5 s; the time of tools lies within the rollout. The shortest two are merged."""
    seconds = {"rollout": 9.0, "update": 3.0, "checkpoint": 1.0, "annotate": 0.5, "publish": 0.5}
    within = {"tools": 7.0, "slowest_episode": 8.0, "step": 14.0}
    timings = {f"timing/{name}": value for name, value in (seconds | within).items()}
    lines = rendered(info, lambda view: view.state.add_step(0, timings, None), 80)
    at = next(number for number, line in enumerate(lines) if "time per step  14s" in line)
    assert lines[at + 1] == "█" * 51 + "▓" * 18 + "▒" * 5 + "░" * 6  # 80 columns: ends at 51.4, 68.6, 74.3, 80
    assert lines[at + 2] == "█ rollout 9.0s 64%   ▓ update 3.0s 21%   ▒ checkpoint 1.0s 7%   ░ other 1.0s 7%"


def test_the_view_keeps_its_height_whatever_the_answers_are(info: RunInfo) -> None:
    def height(words: int, status: str = "running") -> int:
        def feed(view: LiveView) -> None:
            view.state.add_step(0, STEP, EpisodeView("q", "word " * words, 1.0))
            view.status = status

        return len(rendered(info, feed, 80, height=40))

    assert height(1) == height(100) == height(1000)
    assert height(1, "finished") < height(1)


def test_a_narrower_window_is_cleared(info: RunInfo) -> None:
    """Our lines of 100 columns take two rows each at 60: going up by the lines we drew would end in their middle."""
    out = io.StringIO()
    console = Console(file=out, width=100, height=40, force_terminal=True, color_system=None)
    live = Screen(LiveView(RunState(info), lambda: 0.0), console=console, auto_refresh=False)
    live.start()
    drawn = []
    for width in (100, 120, 60, 60):
        console.width = width
        out.truncate(out.seek(0))
        live.refresh()
        drawn.append((out.getvalue().count("\x1b[2J\x1b[H"), "\x1b[1A" in out.getvalue()))
    live.stop()
    assert drawn == [(0, False), (0, True), (1, False), (0, True)]  # the first has nothing to go up over


def test_the_last_three_warnings_stay_also_on_a_small_terminal(info: RunInfo) -> None:
    lines = rendered(info, full, 60, height=24)
    assert len(lines) <= 23
    assert [line for line in lines if line.startswith("! ")] == ["! two", "! three", "! four"]
    assert any("warnings (4)" in line for line in lines)
    assert any(line.startswith("reward ") for line in lines)


@pytest.mark.parametrize("height", [1, 5, 12, 24, 40, 100])
@pytest.mark.parametrize("width", [20, 60, 200])
def test_any_terminal_size_works(info: RunInfo, width: int, height: int) -> None:
    rendered(info, full, width, height)
    rendered(info, lambda view: None, width, height)


def test_before_the_first_step_metrics_are_listed_without_values(info: RunInfo) -> None:
    lines = rendered(info, lambda view: None, 60)
    rows = [line for line in lines if "–" in line]
    assert len(rows) == len(key_metrics(info))
    assert "left" not in "\n".join(lines)  # no pace yet


def test_metrics_that_a_run_does_not_report_are_hidden(info: RunInfo) -> None:
    lines = rendered(info, lambda view: view.state.add_step(0, {"reward/mean": float("nan")}, None), 60)
    labels = [line.split("  ")[0] for line in lines]
    assert "reward" in labels
    assert "entropy" not in labels


def test_a_reply_cannot_control_the_terminal(info: RunInfo) -> None:
    nasty = EpisodeView("q", "line\nbreak \x1b[2J\x07 [red]markup[/red]", None)
    text = "\n".join(rendered(info, lambda view: view.state.add_step(0, STEP, nasty), 100))
    assert "reply     line ⏎ break ·[2J· [red]markup[/red]" in text
    assert "reward –" in text


def test_every_key_metric_has_a_meaning_that_fits_60_columns(info: RunInfo) -> None:
    for row in key_metrics(info):
        for figure in row:
            assert 0 < len(figure.meaning) <= 38
            assert len(figure.label) <= 12


def test_the_live_console_ends_with_the_status_and_all_its_warnings(info: RunInfo) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, height=40, force_terminal=True, color_system=None)
    live = LiveConsole(RunState(replace(info, first_step=3)), console)
    live.stage("update")
    live.progress(1, 2, "batches")
    live.step(3, STEP, SAMPLE, [])
    live.evaluation(4, EVALUATION, None)
    for number in range(4):
        live.warn(f"warning number {number}")
    live.note("a [note]")
    live.close("failed")
    live.warn("after the end")
    text = out.getvalue()
    assert "continuing after step 3" in text
    assert "a [note]" in text
    final = text[text.rindex("sort-gvpo") :]
    assert "failed" in final
    assert [f"warning number {number}" in final for number in range(4)] == [True] * 4
    assert final.endswith("warning: after the end\n")


def test_eta_is_the_median_pace_times_the_steps_left(info: RunInfo) -> None:
    state = RunState(replace(info, total_steps=10))
    assert state.eta() is None
    for index, seconds in enumerate((2.0, 100.0, 3.0)):
        state.add_step(index, {"timing/step": seconds}, None)
    assert state.eta() == 3.0 * 7


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (130, "2m10s"),
        (3599.7, "1h00m"),
        (11100, "3h05m"),
        (93600, "1d02h"),
    ],
)
def test_format_duration(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


def test_format_value() -> None:
    assert [format_value(0.12345, "score"), format_value(0.125, "share"), format_value(34.4, "count")] == [
        "0.123",
        "12%",
        "34",
    ]
    assert [format_value(-0.0, "number"), format_value(1234.5, "number"), format_value(None, "score")] == [
        "0",
        "1.23e+03",
        "–",
    ]


def test_a_straight_line_is_drawn_straight() -> None:
    # 4 × 2 characters are 8 × 8 dots; the line is their diagonal, two dots from lower left to upper right at a time.
    diagonal = plot([(0, 0.0), (7, 1.0)], [], x_end=7, width=11, height=3, style="")
    assert [line.plain for line in diagonal] == ["    1 ┤  ⡠⠊", "    0 ┤⡠⠊  ", "       0  7"]


def test_marks_are_drawn_at_their_points() -> None:
    marked = plot([], [Marks("●", "", [(0, 0.0), (10, 1.0)])], x_end=10, width=11, height=3, style="")
    assert [line.plain[7:] for line in marked[:2]] == ["   ●", "●   "]


def test_sparkline_spans_its_own_range() -> None:
    assert sparkline([0.0, 0.5, 1.0], 12) == "▁▅█"
    assert sparkline([5.0, 1.0, 1.0], 2) == "▄▄"
    assert sparkline([float("nan")], 5) == ""


def test_axes_end_at_round_numbers() -> None:
    assert nice_range([0.1, 0.62]) == pytest.approx((0.0, 0.8))
    assert nice_range([]) == (0.0, 1.0)


NASTY = (0.0, -0.0, 1.0, 1.0 + 2**-52, -1e-300, 5e-324, 999.9999999, 1e15, -1e308, 1e308, math.inf, -math.inf, math.nan)


def test_any_values_can_be_drawn() -> None:
    rng = random.Random(0)
    for _ in range(300):
        width, height, end = rng.randint(1, 120), rng.randint(1, 20), rng.choice((0, 1, 7, 1000))
        line = [rng.choice((*NASTY, rng.gauss(0, 1))) for _ in range(rng.randint(0, 4))]
        marks = Marks("●", "", list(enumerate(rng.choices(NASTY, k=rng.randint(0, 3)))))
        drawn = plot(list(enumerate(line)), [marks], x_end=end, width=width, height=height, style="")
        assert len(drawn) == max(height, 2)
        assert len(sparkline(line, 12)) == sum(abs(value) < 1e15 for value in line)


def test_a_long_run_is_kept_in_bounded_memory(info: RunInfo) -> None:
    """The curve still spans the whole run, and a sparkline shows the newest values."""
    state = RunState(replace(info, total_steps=50_000))
    for index in range(50_000):
        state.add_step(index, STEP | {"grad/norm": float(index % 7), "reward/mean": index / 50_000}, None)
    assert len(state.training) <= 4096 and all(y == x / 50_000 for x, y in state.training)
    places = [0, *(x for x, _ in state.training), 49_999]
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) <= 50_000 / 1000, "no part of the curve is thinner than a screen can show"
    assert all(len(values) <= 64 for values in state.series.values())
    newest = [float(index % 7) for index in range(50_000)]
    assert sparkline(state.series["grad/norm"], 12) == sparkline(newest, 12)


# -- Notebooks ---------------------------------------------------------------------------------------------------------


class Output:
    def __init__(self, shown: list[list[dict[str, str]]], first: dict[str, str]) -> None:
        self.pictures = [first]
        shown.append(self.pictures)

    def update(self, picture: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.pictures.append(picture)


def install(monkeypatch: pytest.MonkeyPatch, shell: Any) -> list[list[dict[str, str]]]:
    shown: list[list[dict[str, str]]] = []

    def display(picture: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw and display_id
        return Output(shown, picture)

    package, inner = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: shell  # type: ignore[attr-defined]
    package.version_info = (9, 0, 0)  # type: ignore[attr-defined]  # matplotlib asks
    inner.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    return shown


def train(model: Path) -> covey.Run:
    settings = SMALL | {"logging.verbosity": "info"}
    return covey.train(str(model), ROWS, vowels, validation=ROWS[:2], **settings)


def test_one_output_is_redrawn(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = install(monkeypatch, SimpleNamespace(kernel=object()))
    run = train(tiny_model_folder)
    (pictures,) = shown
    texts = [picture["text/plain"] for picture in pictures]
    assert "step 0 of 3" in texts[0] and "starting" in texts[0]
    assert [n for n in range(4) if any(f"step {n} of 3" in text for text in texts)] == [0, 1, 2, 3]
    mean = run.metrics[-1]["reward/mean"]
    assert f"reward {mean:.3f}" in texts[-1] and texts[-1].endswith("finished")
    assert all(picture["text/html"].startswith("<pre>") for picture in pictures)
    assert "step  1/3" not in capsys.readouterr().out


def test_ipython_at_a_terminal_is_not_a_notebook(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = install(monkeypatch, SimpleNamespace())
    train(tiny_model_folder)
    assert shown == [] and "step  1/3" in capsys.readouterr().out

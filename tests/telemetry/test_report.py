"""The report: every number computed by hand."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from covey.errors import InputError
from covey.telemetry import compare_curves, print_summary, write_report
from covey.telemetry.charts import moving_average, shortened, smoothing
from covey.telemetry.report import summarise

MakeRun = Callable[..., Path]
Records = list[dict[str, Any]]


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_the_report_by_hand(make_run: MakeRun, records: Records) -> None:
    folder = make_run(records)
    page = write_report(folder)
    assert page == folder / "summary.md"
    text = page.read_text(encoding="utf-8")
    for line in (
        "# sort-gvpo",
        "**gvpo** trained **smollm2-135m** on **sort**: 12 of 12 steps, finished, started 2026-01-31T14:05:09.",
        "`eval/accuracy` is the reward `sorted`. Also measured: `sorted/lenient`.",
        "| `eval/accuracy` | 12.5 % | 50.0 % | +37.5 points |",
        "| `eval/greedy/length_mean` | 40.00 | 30.00 | -10.00 |",
        "| `eval/greedy/sorted` | 12.5 % | 50.0 % | +37.5 points |",
        "| `eval/greedy/sorted/lenient` | 25.0 % | 75.0 % | +50.0 points |",
        "| `eval/greedy/truncated` | 0.0 % | 0.0 % | +0.0 points |",
        "| `eval/sampled/sorted` | 6.2 % | 25.0 % | +18.8 points |",
        # (0 + 5 + 10 + 15 + 20) / 5 = 10 and (35 + 40 + 45 + 50 + 55) / 5 = 45 hundredths
        "- Training reward: 0.100 in the first 5 steps, 0.450 in the last (+0.350).",
        "- Best training step: step 12, mean reward 0.550.",
        "- Best evaluation: after 12 updates, eval/accuracy 50.0 %.",
        # 12 × (3 + 1) + 2 × 6 = 60 seconds
        "- 12,000 tokens generated for training; 1m00s of measured time.",
        "| rollout | 36s | 60 % |",
        "| update | 12s | 20 % |",
        "| evaluate | 12s | 20 % |",
        "| all | 1m00s | 100 % |",
    ):
        assert line in text.splitlines(), line
    assert f"covey sample {folder}" in text
    assert f"covey eval {folder}" in text
    assert png_size(folder / "curve.png") == (1600, 900)


def test_the_console_gets_the_same_numbers(make_run: MakeRun, records: Records) -> None:
    out = io.StringIO()
    print_summary(make_run(records), Console(file=out, width=100))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "before after change" in lines
    assert "eval/accuracy 12.5 % 50.0 % +37.5 points" in lines
    assert "Training reward: 0.100 in the first 5 steps, 0.450 in the last (+0.350)." in lines
    assert lines[-1].endswith("summary.md")


def test_rewards_on_another_scale_are_not_percentages(make_run: MakeRun) -> None:
    folder = make_run(
        [
            {"kind": "eval", "step": 0, "metrics": {"eval/greedy/points": 0.5, "eval/greedy/failed": 1}},
            {"kind": "eval", "step": 9, "metrics": {"eval/greedy/points": 3.0, "eval/greedy/failed": 0}},
        ]
    )
    assert [change.cells() for change in summarise(folder).changes] == [
        ("eval/greedy/failed", "1.00", "0.00", "-1.00"),
        ("eval/greedy/points", "0.50", "3.00", "+2.50"),
    ]


def test_a_single_evaluation_has_no_before(make_run: MakeRun) -> None:
    folder = make_run([{"kind": "eval", "step": 4, "metrics": {"eval/accuracy": 0.5}}])
    assert [change.cells() for change in summarise(folder).changes] == [("eval/accuracy", "–", "50.0 %", "–")]


def test_an_evaluation_before_the_first_step_is_not_one_after_training(make_run: MakeRun, records: Records) -> None:
    """With eval.after=false it is the only one."""
    folder = make_run(records[:-1])
    assert ("eval/accuracy", "12.5 %", "–", "–") in [change.cells() for change in summarise(folder).changes]
    text = write_report(folder).read_text(encoding="utf-8")
    assert "| `eval/accuracy` | 12.5 % | – | – |" in text
    assert "The last evaluation was made before training." in text


def test_without_an_evaluation_before_training_nothing_is_called_before(make_run: MakeRun) -> None:
    """eval.before=false, eval.every=4, eval.after=false, 12 steps of which 10 were made."""
    steps = [{"kind": "step", "step": index, "metrics": {"reward/mean": 0.5}} for index in range(10)]
    evaluations = [{"kind": "eval", "step": s, "metrics": {"eval/accuracy": s / 16}} for s in (4, 8)]
    folder = make_run([*steps[:4], evaluations[0], *steps[4:8], evaluations[1], *steps[8:]])
    assert [change.cells() for change in summarise(folder).changes] == [("eval/accuracy", "–", "50.0 %", "–")]
    out = io.StringIO()
    print_summary(folder, Console(file=out, width=100))
    assert "The last evaluation was made after 8 of 10 updates." in out.getvalue()


def test_a_mean_reward_beyond_one_is_not_called_accuracy(make_run: MakeRun) -> None:
    records = [
        {"kind": "eval", "step": step, "metrics": {"eval/accuracy": value, "eval/greedy/points": value}}
        for step, value in ((0, 0.5), (12, 1.125))
    ]
    folder = make_run(records, trained_reward="points", reward_names=["points"])
    out = io.StringIO()
    print_summary(folder, Console(file=out, width=100))
    text = write_report(folder).read_text(encoding="utf-8")
    assert "accuracy" not in text and "accuracy" not in out.getvalue()
    assert "| `eval/greedy/points` | 0.50 | 1.12 | +0.62 |" in text
    assert "`eval/greedy/points` is the mean of the trained reward `points`." in text
    assert "- Best evaluation: after 12 updates, eval/greedy/points 1.12." in text


def test_with_opponents_the_accuracy_is_not_the_reward_of_all_roles(make_run: MakeRun) -> None:
    """Rewards of two players that cancel: the episode's is 0, that of the trained role is not."""
    records = [
        {
            "kind": "eval",
            "step": step,
            "metrics": {"eval/accuracy": value, "eval/sampled/given": 0.0, "eval/sampled/given/a": value},
        }
        for step, value in ((0, -1.0), (12, 0.5))
    ]
    folder = make_run(records, trained_reward="given", reward_names=["given"])
    assert [change.cells() for change in summarise(folder).changes] == [
        ("eval/accuracy", "-1.00", "0.50", "+1.50"),
        ("eval/sampled/given", "0.00", "0.00", "+0.00"),
        ("eval/sampled/given/a", "-1.00", "0.50", "+1.50"),
    ]
    text = write_report(folder).read_text(encoding="utf-8")
    assert "- Best evaluation: after 12 updates, eval/accuracy 0.50." in text
    assert "`eval/accuracy` is the mean of the trained reward `given` over the trained roles." in text


def test_the_first_of_equally_good_steps_is_the_best_and_null_rewards_are_skipped(make_run: MakeRun) -> None:
    rewards = [0.5, None, 0.9, 0.9]
    folder = make_run(
        [{"kind": "step", "step": index, "metrics": {"reward/mean": reward}} for index, reward in enumerate(rewards)]
    )
    summary = summarise(folder)
    assert summary.best_step == (3, 0.9)
    assert (summary.steps, summary.ends, summary.first, summary.last) == (4, 1, 0.5, 0.9)


def test_a_run_without_records_has_a_report(make_run: MakeRun) -> None:
    folder = make_run([], status="failed")
    text = write_report(folder).read_text(encoding="utf-8")
    assert "0 of 12 steps, failed" in text
    assert "The run was not evaluated." in text
    assert png_size(folder / "curve.png") == (1600, 900)
    print_summary(folder, Console(file=io.StringIO()))


@pytest.mark.filterwarnings("error")  # matplotlib's: the layout has collapsed
def test_long_names_do_not_shrink_the_curve(make_run: MakeRun, records: Records, tmp_path: Path) -> None:
    path = "/".join(["folder"] * 40)
    folder = make_run(records[:2], title="a long title " * 12, model=path)
    write_report(folder)
    compare_curves([folder, folder], [path, path + "x"], tmp_path / "both.png")
    assert png_size(folder / "curve.png") == png_size(tmp_path / "both.png") == (1600, 900)
    assert shortened("0123456789", 10) == "0123456789" and shortened("0123456789x", 10) == "0123…789x"


def test_runs_side_by_side(make_run: MakeRun, records: Records, tmp_path: Path) -> None:
    folders = [make_run(records, "a"), make_run(records[:3], "b", algorithm="grpo")]
    out = compare_curves(folders, ["gvpo", "grpo"], tmp_path / "images" / "both.png")
    assert png_size(out) == (1600, 900)
    with pytest.raises(InputError, match="2 folders, but 1 labels"):
        compare_curves(folders, ["gvpo"], out)


def test_a_folder_without_run_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"run\.json: no such file"):
        write_report(tmp_path)


def test_moving_average_by_hand() -> None:
    points = [(0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)]
    assert moving_average(points, 3) == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)]
    assert moving_average(points, 1) == points
    assert [smoothing(steps) for steps in (5, 10, 40, 100, 10_000)] == [1, 3, 7, 13, 51]


def test_every_key_metric_is_in_the_glossary(info: Any) -> None:
    from covey.telemetry.key_metrics import key_metrics

    glossary = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for row in key_metrics(info):
        for figure in row:
            name = figure.key.replace("greedy/sorted", "{mode}/{reward}").replace("sampled/sorted", "{mode}/{reward}")
            assert f"`{name}`" in glossary, figure.key

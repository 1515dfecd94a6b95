"""The speed benchmarks from end to end on a tiny model, their ratios by hand, and what holds them together."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import BENCHMARKS

ROOT = BENCHMARKS.parent
ORACLES = ROOT / ".venv-oracles" / "bin" / "python"
ALWAYS = {"name", "device", "versions", "header", "cells", "rows", "plot", "notes", "settings", "command", "tiny"}


def outcome(name: str, out: Path, *words: str) -> dict[str, Any]:
    script = importlib.import_module(name)
    assert script.main(["--tiny", "--out", str(out), *words]) == 0
    (path,) = out.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    assert path.name == f"{found['name']}-tiny-cpu.json" and path.with_suffix(".png").stat().st_size > 1000
    assert set(found) >= ALWAYS
    assert {"covey", "torch", "transformers"} <= set(found["versions"])
    assert found["cells"] and all(len(cells) == len(found["header"]) for cells in found["cells"])
    return found


# -- from end to end -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_process")
def test_step(tmp_path: Path) -> None:
    found = outcome("step", tmp_path, "--sides", "covey")
    fixed, floor, natural = found["rows"]
    assert (fixed["side"], floor["side"], natural["side"]) == ("covey", "floor", "covey")
    assert fixed["tokens"] == 2 * 2 * 4  # no token ends an answer
    assert fixed["step_s"] == pytest.approx(fixed["sampling_s"] + fixed["learning_s"])  # one timed step
    assert fixed["tokens_per_s"] == pytest.approx(16 / fixed["step_s"])
    assert fixed["over_floor"] == pytest.approx(fixed["step_s"] / floor["step_s"])
    assert fixed["mfu"] == pytest.approx(floor["learning_s"] / fixed["learning_s"])
    assert fixed["peak"] > 0.01 and "over_floor" in natural and natural["over_floor"] is None
    (run,) = found["runs"]["tiny, fixed"]["covey"]
    assert "prompts" not in run and len(run["steps"]) == 1
    assert [m["unit"] for m in found["measures"]] == ["s", "s", "tokens/s", "GiB"] * 2
    assert found["measures"][1]["repeats"] == [fixed["learning_s"]]


@pytest.mark.usefixtures("in_process")
def test_decode(tmp_path: Path) -> None:
    found = outcome("decode", tmp_path)
    assert [(row["batch"], row["side"]) for row in found["rows"]] == [
        (1, "covey"),
        (1, "transformers"),
        (2, "covey"),
        (2, "transformers"),
    ]
    for row in found["rows"]:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["length"] / row["seconds"])
    assert "vLLM was not measured." in found["notes"]


@pytest.mark.usefixtures("in_process")
def test_memory(tmp_path: Path) -> None:
    found = outcome("memory", tmp_path)
    assert [(row["vocabulary"], row["tokens"]) for row in found["rows"]] == [
        (256, 16),
        (256, 64),
        (1024, 16),
        (1024, 64),
    ]
    assert found["rows"][-1]["logits"] == 1024 * 64 * 4 / 2**30
    assert all(row["peak"] > 0.01 for row in found["rows"])


@pytest.mark.usefixtures("in_process")
def test_scaling(tmp_path: Path) -> None:
    found = outcome("scaling", tmp_path)
    kinds = [row["varies"] for row in found["rows"]]
    assert [kinds.count(kind) for kind in ("group", "prompt", "answer", "prompt shared")] == [2, 2, 2, 2]
    alone, shared = found["rows"][-2:]
    assert alone["load"] | {"prompt_tokens": 32} == shared["load"] and alone["load"]["prompt_tokens"] == 1
    assert alone["ratios"] == {"sampling": 1, "learning": 1, "step": 1}
    assert shared["ratios"]["learning"] == pytest.approx(shared["learning_s"] / alone["learning_s"])
    assert f"a step costs {shared['ratios']['step']:.2f} ×" in found["notes"][-1]


@pytest.mark.usefixtures("in_process")
def test_regime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import regime

    monkeypatch.setattr(regime, "TOOL_S", 0.01)
    rows = outcome("regime", tmp_path, "--repeats", "3")["rows"]
    assert [row["case"] for row in rows if row["side"] == "floor"] == list(regime.CASES)
    for covey, floor in zip(rows[::2], rows[1::2], strict=True):
        assert covey["seconds"] == sorted(covey["repeats_s"])[1]
        assert covey["over_floor"] == pytest.approx(covey["seconds"] / floor["seconds"])
        assert covey["speed_up"] is None  # nobody to compare with
    tokens = rows[-2]["tokens_per_s"] * rows[-2]["seconds"]
    assert tokens == pytest.approx(4 * 5 * 40)  # agents × turns × tokens of a turn


@pytest.mark.usefixtures("in_process")
def test_lora(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (row,) = outcome("lora", tmp_path)["rows"]
    # Rank 16 on seven matrices of two layers: (in + out) · 16 each.
    assert row["trained"] == 2 * 16 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3)


@pytest.mark.slow
@pytest.mark.skipif(not ORACLES.is_file(), reason="needs make oracles")
def test_step_beside_trl(tmp_path: Path) -> None:
    import step

    assert step.main(["--tiny", "--trl-python", str(ORACLES), "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "step-tiny-cpu.json").read_text())["rows"]
    covey, trl = (row for row in rows if row["case"] == "tiny, fixed" and row["side"] != "floor")
    assert trl["tokens"] == covey["tokens"] == 16
    assert covey["speed_up"] == pytest.approx(covey["tokens_per_s"] / trl["tokens_per_s"])


# -- the parts -------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_side_are_medians() -> None:
    import step

    def run(peak: float, *steps: tuple[float, float, int]) -> dict[str, Any]:
        return {"peak": peak, "steps": [{"sampling": s, "learning": t, "tokens": n} for s, t, n in steps]}

    found = step.summary([run(2.0, (1, 1, 10)), run(3.0, (2, 3, 20), (4, 8, 120))])
    assert (found["sampling_s"], found["learning_s"], found["step_s"]) == (2, 3, 5)
    assert found["tokens_per_s"] == 5 and found["peak"] == 3 and found["spread_s"] == [2, 12]


def test_both_sides_must_have_had_the_same_prompts() -> None:
    import step

    class Fake:
        def run(self, side: str, case: Any, python: Any) -> Any:
            return {"prompts": [[1, 2]] if side == "covey" else [[1, 3]]}

    with pytest.raises(AssertionError, match="different prompts"):
        step.measure(Fake(), {"name": "x"}, {"covey": Path(), "trl": Path()}, 1, [])


def test_a_side_that_fails_is_named_and_left_out() -> None:
    import step
    from kit.child import ChildFailed

    asked = []

    class Fake:
        def run(self, side: str, case: Any, python: Any) -> Any:
            asked.append(side)
            if side == "trl":
                raise ChildFailed("trl: exit code 1\nout of memory")
            return {"prompts": []}

    failures: list[str] = []
    found = step.measure(Fake(), {"name": "x"}, {"covey": Path(), "trl": Path()}, 2, failures)
    assert asked == ["covey", "trl", "covey"] and len(found["covey"]) == 2 and "trl" not in found
    assert failures == ["x: trl: exit code 1\nout of memory"]


def test_the_speed_up_is_over_the_best_micro_batch_of_trls() -> None:
    import step
    from kit.floors import Rates

    asked = []

    class Fake:
        def run(self, side: str, case: Any, python: Any) -> Any:
            asked.append((side, case["micro_batch"]))
            seconds = {("covey", 4): 1.0, ("trl", 2): 8.0, ("trl", 4): 4.0}[side, case["micro_batch"]]
            steps = [{"sampling": seconds / 2, "learning": seconds / 2, "tokens": 16}]
            return {"prompts": [[1] * 8] * 2, "peak": 1.0, "steps": steps}

    case = {
        "name": "x",
        "model": "tiny",
        "dtype": "float32",
        "group": 2,
        "max_tokens": 4,
        "fixed": True,
        "micro_batch": 4,
    }
    sides = {name: Path() for side in ("covey", "trl") for name in step.names(side, [2, 4])}
    rows = step.rows_of(case, step.measure(Fake(), case, sides, 1, []), Rates(1e9, 1e9, ""))
    assert asked == [("covey", 4), ("trl", 2), ("trl", 4)]
    assert {row["side"]: row.get("speed_up") for row in rows} == {"covey": 4, "trl/2": 0.5, "trl/4": 1, "floor": None}


def test_trl_makes_one_optimiser_step_of_all_answers() -> None:
    from kit.rivals import trl_arguments

    settings = {"prompts": [""] * 32, "group": 8, "micro_batch": 64, "max_tokens": 256, "fixed": True, "lr": 1e-6}
    settings |= {"warmup": 2, "steps": 3, "device": "cuda"}
    found = trl_arguments(settings, "")
    assert found["per_device_train_batch_size"] * found["gradient_accumulation_steps"] == 256
    assert found["max_steps"] == 5 and found["beta"] == 0 and found["num_iterations"] == 1
    assert found["generation_kwargs"] == {"min_new_tokens": 256}
    assert trl_arguments(settings | {"fixed": False}, "")["generation_kwargs"] is None
    with pytest.raises(AssertionError, match="do not divide"):
        trl_arguments(settings | {"micro_batch": 100}, "")


def test_answer_lengths_have_a_heavy_tail() -> None:
    from regime import answer_lengths

    lengths = answer_lengths(4000, 1000, 0.9, 8192)
    assert lengths == answer_lengths(4000, 1000, 0.9, 8192)
    assert sorted(lengths)[2000] == pytest.approx(1000, rel=0.05)
    assert max(lengths) == 8192
    longer = sum(length > 1000 * math.exp(0.9) for length in lengths) / 4000
    assert longer == pytest.approx(0.159, abs=0.02)  # beyond one standard deviation


def test_the_memory_of_a_further_token() -> None:
    import memory

    kib = 1024 / 2**30
    rows = [
        {"vocabulary": v, "tokens": t, "working": 1 + t * slope * kib}
        for v, slope in ((100, 3), (900, 5))
        for t in (10, 20, 40)
    ]
    assert "3 KiB with 100, 5 KiB with 900 words" in memory.growth(rows)


def test_versions_of_several_sides() -> None:
    from kit.measure import merged

    sides = {"covey": {"torch": "2", "python": "3.11"}, "trl": {"torch": "2", "trl": "1", "python": "3.12"}}
    assert merged(sides) == {"torch": "2", "python": "3.11 (covey), 3.12 (trl)", "trl": "1"}


# -- processes -------------------------------------------------------------------------------------------------------

SCRIPT = """
import subprocess, sys
sys.path.insert(0, {benchmarks!r})
from kit.child import serve

def answer(settings):
    return {{"twice": 2 * settings["number"], "path": sys.path}}

def broken(settings):
    print("before the end")
    raise ValueError("no such thing")

def asleep(settings):
    started = subprocess.Popen(["sleep", "60"])
    open(settings["note"], "w").write(str(started.pid))
    started.wait()

serve({{"answer": answer, "broken": broken, "asleep": asleep}})
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(benchmarks=str(BENCHMARKS)))
    return str(path)


def test_a_child_answers_with_this_checkouts_covey(script: str) -> None:
    from kit.child import Children

    found = Children(script, 60).run("answer", {"number": 21})
    assert found["twice"] == 42 and str(ROOT / "src") in found["path"]


def test_a_child_that_fails_shows_why(script: str) -> None:
    from kit.child import ChildFailed, Children

    with pytest.raises(ChildFailed, match=r"(?s)broken: exit code 1.*before the end.*no such thing"):
        Children(script, 60).run("broken", {})


def test_when_the_time_is_up_nothing_is_left_running(script: str, tmp_path: Path) -> None:
    from kit.child import ChildFailed, Children

    note = tmp_path / "note"
    with pytest.raises(ChildFailed, match="asleep: the time was up"):
        Children(script, 2).run("asleep", {"note": str(note)})
    for _ in range(100):
        if not note.is_file() or not _alive(int(note.read_text())):
            return
        time.sleep(0.05)
    pytest.fail("its own child sleeps on")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text() if Path(f"/proc/{pid}/stat").is_file() else ") Z"
    return state.rsplit(")", 1)[1].split()[0] != "Z"  # a zombie has ended


def test_gpu_goes_on_after_a_failure_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import gpu

    (tmp_path / "bad.py").write_text("raise SystemExit('out of memory')")
    (tmp_path / "good.py").write_text("import sys; print('words', sys.argv[1:])")
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", ("bad", "good"))
    out = tmp_path / "out"
    assert gpu.main(["--parts", "bad,good", "--out", str(out)]) == 1
    told = capfd.readouterr()
    assert "out of memory" in told.err and "--device', 'cuda'" in told.out
    assert re.search(r"\| bad \| exit code 1 \|", told.out) and re.search(r"\| good \| ok \|", told.out)
    assert gpu.main(["--parts", "good", "--out", str(out), "--", "--tiny"]) == 0
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "worse"])


# -- the report ------------------------------------------------------------------------------------------------------


def result(**changes: Any) -> Any:
    from kit.report import Plot, Result

    plot = Plot("Speed", "s", {"a": [1.0, None], "b": [2.0, 3.0]}, ["x", "y"])
    base = Result(
        "step", "NVIDIA H200", {"torch": "2.11"}, ("a", "b"), [("1", "2")], [{"a": 1}], plot, command="run it"
    )
    return type(base)(**{**base.__dict__, **changes})


def test_files_have_stable_names() -> None:
    assert result().file_name == "step-nvidia-h200"
    assert result(device="AMD EPYC, 2 threads").file_name == "step-cpu"
    assert result(device="AMD EPYC, 2 threads", tiny=True).file_name == "step-tiny-cpu"


def test_a_result_is_read_as_it_was_written_and_put_into_its_section(tmp_path: Path) -> None:
    from kit.report import publish, read, write_page

    path = publish(result(notes=["a note"]), tmp_path)
    again = read(path)
    assert again.date and again.commit and again.machine["cores"] == os.cpu_count()
    assert f"{again.date}, commit {again.commit}; NVIDIA H200" in again.text()
    assert replace(again, date="", commit="").text() == result(notes=["a note"]).text()
    page = tmp_path / "page.md"
    page.write_text("<!-- step-nvidia-h200: begin -->\nnothing\n<!-- step-nvidia-h200: end -->\n")
    write_page(again, page, tmp_path / "images")
    text = page.read_text()
    assert "nothing" not in text and "| 1 | 2 |" in text and "- a note" in text and "torch 2.11" in text
    (picture,) = re.findall(r"\]\(images/([^)]+)\)", text)
    assert (tmp_path / "images" / picture).is_file()


def test_the_page_has_a_section_for_every_result() -> None:
    import gpu

    page = (ROOT / "docs" / "benchmarks.md").read_text()
    wanted = {f"{part}-nvidia-h200" for part in gpu.PARTS} | {
        f"{p}-cpu" for p in ("step", "decode", "memory", "scaling")
    }
    for name in wanted:
        assert page.count(f"<!-- {name}: begin -->") == page.count(f"<!-- {name}: end -->") == 1, name


def test_every_table_of_the_page_is_that_of_its_record() -> None:
    from kit.report import RECORDS, read

    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for path in RECORDS.glob("*.json"):
        section = re.search(f"<!-- {path.stem}: begin -->(.*)<!-- {path.stem}: end -->", page, re.DOTALL)
        assert section is not None and read(path).text() in section[1], f"run make bench-tables: {path.stem}"


def test_a_command_is_told_without_this_machines_places() -> None:
    from kit.report import command_line

    given = ["/a/benchmarks/step.py", "--out", "/tmp/x", "--device", "cuda", "--trl-python", "/b", "--steps", "2"]
    assert command_line(given) == "python benchmarks/step.py --device cuda --steps 2"


def test_numbers_and_ratios() -> None:
    from kit.report import number, ratio

    assert [number(x) for x in (None, 0.01234, 1.5, 123.4, 53300.0)] == ["–", "0.0123", "1.5", "123", "53,300"]
    assert ratio(3, 2) == 1.5 and ratio(None, 2) is None and ratio(3, None) is None and ratio(3, 0) is None


def test_what_is_left_out_of_the_archive() -> None:
    from pack import LEFT_OUT, matches

    def left_out(path: str) -> bool:
        return any(matches(Path(path), pattern) for pattern in LEFT_OUT)

    assert left_out("pandas/tests/a/b.py") and left_out("pyarrow/libarrow_flight.so.2600") and left_out("pyarrow/x.pyx")
    assert not left_out("pyarrow/libarrow_substrait.so.2600") and not left_out("trl/trainer/utils.py")
    assert not left_out("pandas/io/parquet.py")


def test_without_trl_the_fix_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import step

    assert step.main(["--tiny", "--trl-python", str(tmp_path / "python")]) == 2
    assert "make .venv-oracles/stamp" in capsys.readouterr().out

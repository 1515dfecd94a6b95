"""Comparing hand-made records."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest


def record(path: Path, *measures: tuple[str, float, str], device: str = "AMD EPYC, 2 threads") -> Path:
    from kit.report import Measure, Plot, Result

    plot = Plot("Speed", "s", {"a": [1.0]}, ["x"])
    found = [Measure(name, value, unit, [value, 2 * value]) for name, value, unit in measures]
    path.write_text(json.dumps(asdict(Result("step", device, {}, (), (), (), plot, measures=found))))
    return path


def compared(tmp_path: Path, *words: str) -> int:
    import compare

    return compare.main([str(tmp_path / "new.json"), "--baseline", str(tmp_path / "old.json"), *words])


@pytest.mark.parametrize(
    ("old", "new", "unit", "code"),
    [
        (10.0, 10.9, "s", 0),
        (10.0, 11.1, "s", 1),
        (10.0, 5.0, "s", 0),
        (4.0, 4.5, "GiB", 1),
        (100.0, 92.0, "tokens/s", 0),  # 100 / 92 = 1.087
        (100.0, 90.0, "tokens/s", 1),  # 100 / 90 = 1.11
        (100.0, 300.0, "tokens/s", 0),
    ],
)
def test_a_measure_may_cost_a_tenth_more(tmp_path: Path, old: float, new: float, unit: str, code: int) -> None:
    record(tmp_path / "old.json", ("x", old, unit))
    record(tmp_path / "new.json", ("x", new, unit))
    assert compared(tmp_path) == code
    assert compared(tmp_path, "--tolerance", "0.2") == 0


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "old.json", ("learning", 8.0, "s"), ("speed", 50.0, "tokens/s"), ("gone", 1.0, "s"))
    record(tmp_path / "new.json", ("learning", 10.0, "s"), ("speed", 100.0, "tokens/s"), ("other", 3.0, "s"))
    assert compared(tmp_path) == 1
    out = capsys.readouterr().out
    assert "| learning | s | 8 | 10 | 1.25 | 10 to 20 | worse |" in out
    assert "| speed | tokens/s | 50 | 100 | 0.50 | 100 to 200 | better |" in out
    assert "| other | s | – | 3 | – | 3 to 6 | new |" in out
    assert "| gone | s | 1 | – | – | – | not measured |" in out


def test_the_default_baseline_is_the_committed_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import compare

    records = tmp_path / "records"
    records.mkdir()
    monkeypatch.setattr(compare, "RECORDS", records)
    new = record(tmp_path / "step-cpu.json", ("x", 2.0, "s"))
    with pytest.raises(SystemExit):
        compare.main([str(new)])
    record(records / "step-cpu.json", ("x", 1.0, "s"))
    assert compare.main([str(new)]) == 1


def test_two_machines_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "old.json", ("x", 1.0, "s"), device="NVIDIA H200")
    record(tmp_path / "new.json", ("x", 1.0, "s"))
    with pytest.raises(SystemExit):
        compared(tmp_path)
    assert "new.json is of AMD EPYC, 2 threads, its baseline of NVIDIA H200" in capsys.readouterr().err

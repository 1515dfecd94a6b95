"""The files in examples/ run as they say they are run."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.is_file() and path.suffix != ".pyc")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.parametrize("model", [None, "ORG/NAME"])
def test_an_example_runs(
    path: Path,
    model: str | None,
    place: Path,
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if path.suffix == ".sh":  # job scripts: what is in them runs in tests/cli/test_slurm.py
        subprocess.run(["bash", "-n", str(path)], check=True)
        return
    words = [model] if model else []
    if model:
        Path(model).parent.mkdir()
        Path(model).symlink_to(tiny_model_folder, target_is_directory=True)
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    runpy.run_path(str(path), run_name="__main__")
    figures = [dict(re.findall(r"(\S+)=(-?[\d.]+)", line)) for line in capsys.readouterr().out.splitlines()]
    spread = [float(figure["gvpo/std_weight"]) for figure in figures if figure]
    # One reward of 1 among four: R − R̄ is ¾ and three times −¼ at first. What is learned is taken off.
    assert len(spread) == 5 and spread[0] == pytest.approx(0.1875**0.5, abs=1e-3)
    assert spread == sorted(spread, reverse=True) and spread[-1] < spread[0]

"""The command line as a whole: how it is started, and what it answers before a command begins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli.main import main


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["algorithms"], ["trian"], ["config", "explain", "lernr.lr"]]
)
def test_python_dash_m_is_the_same_command(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = subprocess.run([sys.executable, "-m", "covey", *words], cwd=tmp_path, capture_output=True, text=True)
    assert (started.returncode, started.stdout, started.stderr) == (main(words), *capsys.readouterr())

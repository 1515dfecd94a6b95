"""What a command imports: torch alone takes seconds, which only commands that need it may cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from covey.cli.main import COMMANDS
from tests.dashboard.synthetic import write_run

SLOW = ("torch", "transformers", "pyarrow", "matplotlib", "peft", "ray")
SCRIPT = """
import json, sys
from covey.cli.main import main
codes = [main(line.split()) for line in sys.argv[2:]]
with open(sys.argv[1], "w") as file:
    json.dump({"codes": codes, "modules": [name for name in sys.modules if "." not in name]}, file)
"""


def imported_by(folder: Path, *lines: str) -> tuple[set[int], list[str]]:
    """The exit codes of commands in a process of their own, and the slow packages that they imported."""
    write_run(folder / "outputs/2026-01-31/14-05-09", {"reward/mean": np.array([0.1, 0.2])}, {0: 0.1, 2: 0.3})
    found = folder / "found.json"
    command = [sys.executable, "-c", SCRIPT, str(found), *lines]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    told = json.loads(found.read_text())
    return set(told["codes"]), [name for name in SLOW if name in told["modules"]]


@pytest.mark.parametrize(
    "line",
    [
        "runs",
        "algorithms",
        "algorithms gspo",
        "config explain learner.lr",
        "config explain algorithm=gvpo",
        "config algorithm=grpo learner.lr=1e-5",
    ],
)
def test_a_command_that_loads_no_model_imports_nothing_slow(tmp_path: Path, line: str) -> None:
    assert imported_by(tmp_path, line) == ({0}, [])


def test_no_help_imports_anything_slow(tmp_path: Path) -> None:
    assert imported_by(tmp_path, "--help", *(f"{command} --help" for command in COMMANDS)) == ({0}, [])


def test_a_misspelt_setting_is_reported_before_anything_slow_is_imported(tmp_path: Path) -> None:
    assert imported_by(tmp_path, "train algorithm.gvpo_bta=0.2") == ({2}, [])


def test_the_check_sees_what_a_command_imports(tmp_path: Path) -> None:
    """doctor asks torch for GPUs. If it were not seen here, the tests above would prove nothing."""
    assert "torch" in imported_by(tmp_path, "doctor")[1]

"""Runs the command `covey` of this checkout in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


def run_covey(words: Sequence[str], **options: Any) -> None:
    """Run the command; raises if it fails. `options` are those of subprocess.run."""
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "covey.cli.main", *words]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths}, **options)

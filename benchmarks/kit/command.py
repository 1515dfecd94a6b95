"""`covey` as a benchmark starts it: this checkout's, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


def run_covey(words: Sequence[str], **options: Any) -> None:
    """To its end, which must be a good one. `options` are those of subprocess.run."""
    paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "covey.cli.main", *words]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths}, **options)

"""Tasks whose updates were left out, because a loss or a gradient was not finite: told in words, and saved when there
are so many in a row that the run ends.

    nonfinite-step-000012.json    the tasks of the steps in a row, for: covey data show FILE
"""

from __future__ import annotations

import json
import shlex
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey.redact import hide_known
from covey.storage import StorageFailed, write_whole
from covey.types import Task

SHOWN = 3  # tasks that a warning names


class Offenders:
    def __init__(self, folder: Path, *, limit: int, skipped: int, warn: Callable[[str], None]) -> None:
        """`limit`: updates left out in a row that end the run. `skipped`: so many were left out before."""
        self.folder, self.limit, self.warn = folder, limit, warn
        self._skipped = float(skipped)
        self._told = False
        self._steps: deque[tuple[int, Sequence[Task]]] = deque(maxlen=limit)

    def after(self, step: int, skipped: float, tasks: Sequence[Task]) -> None:
        """A step was made; `skipped` updates of the run so far were left out."""
        new, self._skipped = int(skipped - self._skipped), skipped
        if not new:
            return
        self._steps.append((step, tasks))
        if not self._told:
            self._told = True
            names = ", ".join(task.id for task in tasks[:SHOWN]) + (", …" if len(tasks) > SHOWN else "")
            self.warn(
                f"step {step + 1}: {new} update{'s' * (new > 1)} left out, whose loss or gradient is not finite; the "
                f"weights stay as they were (tasks {names}). They are counted as optim/skipped; "
                f"learner.max_skipped={self.limit} in a row end the run"
            )

    def end(self, step: int, tasks: Sequence[Task], error: BaseException) -> None:
        """The step that was one too many: its tasks and those of the ones before are saved, the error says where."""
        self._steps.append((step, tasks))
        path = self.folder / f"nonfinite-step-{step:06d}.json"
        try:
            write_whole(path, hide_known(json.dumps(self._records(), indent=1, default=str)))
        except StorageFailed as full:
            error.add_note(f"  the tasks could not be saved: {full}")
            return
        error.add_note(
            f"  the tasks of these steps:  covey data show {shlex.quote(str(path))}\n"
            f"  answers that were recorded before:  covey dash {shlex.quote(str(self.folder))}"
        )

    def _records(self) -> list[dict[str, Any]]:
        """Each task once, with the steps it was in."""
        found: dict[str, dict[str, Any]] = {}
        for step, tasks in self._steps:
            for task in tasks:
                blank = {"data_id": task.id, "messages": list(task.messages), "answer": task.answer, "steps": []}
                found.setdefault(task.id, blank)["steps"].append(step)
        return list(found.values())

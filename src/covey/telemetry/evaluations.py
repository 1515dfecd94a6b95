"""evaluations/step-000025.json: every answer of an evaluation, for paired comparisons of runs on the same tasks.

    {"schema": 1, "step": 25, "modes": {"greedy": {
        "task": ["test.jsonl:1", …], "attempt": [0, …], "rewards": {"math_equal": [1.0, null, …]},
        "tokens": [211, …], "turns": [1, …], "tools": [0, …], "stop": ["eos", …], "failure": [null, …]}}}

All columns of a mode have one entry per answer. A file is written at once, and again with the same content if a resumed
run repeats the evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.errors import InputError
from covey.redact import hide_known
from covey.storage import write_atomically, writing
from covey.telemetry.jsonl import finite
from covey.types import Episode

FOLDER = "evaluations"
SCHEMA = 1


def columns_of(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The answers of one mode as columns."""
    names = dict.fromkeys(name for episode in episodes for name in episode.rewards)
    done = [episode.failure is None for episode in episodes]
    return {
        "task": [episode.task.id for episode in episodes],
        "attempt": _attempts(episodes),
        "rewards": {
            name: [e.rewards.get(name) if ok else None for e, ok in zip(episodes, done, strict=True)] for name in names
        },
        "tokens": [episode.response_tokens for episode in episodes],
        "turns": [len(episode.turns) for episode in episodes],
        "tools": [len(episode.tools) for episode in episodes],
        "stop": [None if episode.stop is None else str(episode.stop) for episode in episodes],
        "failure": [None if episode.failure is None else episode.failure.cause for episode in episodes],
    }


def _attempts(episodes: Sequence[Episode]) -> list[int]:
    """The number of each answer among those to the same task. Attempts at a task are adjacent."""
    numbers: list[int] = []
    for index, episode in enumerate(episodes):
        again = index > 0 and episodes[index - 1].task is episode.task
        numbers.append(numbers[-1] + 1 if again else 0)
    return numbers


def write_evaluation(run: Path, step: int, answers: Mapping[str, Sequence[Episode]]) -> None:
    """`answers` by mode, `step` the number of updates before."""
    modes = {mode: columns_of(episodes) for mode, episodes in answers.items()}
    path = run / FOLDER / f"step-{step:06d}.json"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    record = finite({"schema": SCHEMA, "step": step, "modes": modes})
    write_atomically(path, hide_known(json.dumps(record, separators=(",", ":"))) + "\n")


def evaluation_files(run: Path) -> dict[int, Path]:
    """The files of a run's evaluations, by the number of updates before."""
    return {int(path.stem.removeprefix("step-")): path for path in sorted((run / FOLDER).glob("step-*.json"))}


def read_evaluation(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise InputError(f"{path} is not an evaluation of schema {SCHEMA}")
    return record


def remove_evaluations_after(run: Path, step: int) -> None:
    """Remove what an earlier process wrote after the checkpoint from which the run is resumed."""
    for done, path in evaluation_files(run).items():
        if done > step:
            path.unlink(missing_ok=True)


def copy_evaluations(source: Path, target: Path, step: int) -> None:
    """The evaluations of another run up to a step, for a run that branches off there."""
    for done, path in evaluation_files(source).items():
        if done <= step:
            copy = target / FOLDER / path.name
            with writing(copy):
                copy.parent.mkdir(exist_ok=True)
            write_atomically(copy, path.read_text(encoding="utf-8"))

"""covey.train: a training run in one call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.algorithms import algorithm_schemas
from covey.cli.prepare import Prepared, prepare
from covey.cli.train import run_to_end
from covey.config import compose, literal
from covey.errors import InputError
from covey.tasks import TaskSet, read_tasks, reward_by_answers, with_system_prompt
from covey.types import Task

if TYPE_CHECKING:
    from covey.loop.run import Run

Tasks = str | Path | Sequence[Task | Mapping[str, Any]]


def train(
    model: str = "smollm2-135m",
    tasks: Tasks = "sort",
    reward: str | Callable[..., Any] | Sequence[Any] | None = None,
    algorithm: str = "gvpo",
    *,
    validation: Tasks | None = None,
    **config: Any,
) -> Run:
    """Train and return the run: its folder (`run.path`), its evaluations, its learner with the trained model.

    `tasks` is the name of a data set or generated task, a file, or a list of Tasks or dicts with `question` and
    `answer`. `reward` is a function, a name, or a list of them. Settings go by section, `learner={"lr": 2e-5}`, or by
    key, `**{"learner.lr": 2e-5}`.
    """
    return run_to_end(prepare_run(model, tasks, reward, algorithm, validation=validation, **config))


def prepare_run(
    model: str = "smollm2-135m",
    tasks: Tasks = "sort",
    reward: str | Callable[..., Any] | Sequence[Any] | None = None,
    algorithm: str = "gvpo",
    *,
    validation: Tasks | None = None,
    **config: Any,
) -> Prepared:
    """Everything that `train` checks before weights are loaded."""
    settings = [f"model.name={_quoted(model)}", f"algorithm={algorithm}", *_settings(config)]
    given: TaskSet | None = None
    if isinstance(tasks, (str, Path)):
        key = "data.train_files" if _is_file(tasks) else "data.name"
        settings.append(f"{key}={_quoted(str(tasks))}")
        if isinstance(validation, (str, Path)):
            settings.append(f"data.val_files={_quoted(str(validation))}")
        elif validation is not None:
            raise InputError("validation= must be a file when tasks= is one")
    else:
        held_out = () if validation is None else _held_out(validation)
        rows = _tasks(tasks)
        given = TaskSet(rows, held_out, reward_by_answers((*rows, *held_out)), "tasks given in Python")
    composed = compose(settings, algorithms=algorithm_schemas())
    if given is not None:
        given = with_system_prompt(given, composed.config.data.system_prompt)
    return prepare(composed, tasks=given, reward=reward)


def _is_file(tasks: str | Path) -> bool:
    return isinstance(tasks, Path) or "." in tasks or "/" in tasks


def _held_out(validation: Tasks) -> tuple[Task, ...]:
    """What to evaluate on, beside a list of tasks: a list, or files."""
    if isinstance(validation, (str, Path)):
        return tuple(read_tasks("validation", str(validation)))
    return _tasks(validation)


def _tasks(rows: Sequence[Task | Mapping[str, Any]]) -> tuple[Task, ...]:
    found = tuple(row if isinstance(row, Task) else _task(row, number) for number, row in enumerate(rows))
    if not found:
        raise InputError("tasks= is empty")
    seen: set[str] = set()
    for task in found:
        if task.id in seen:  # the id names a task's random streams
            raise InputError(f"two tasks have the id {task.id!r}\n  give each its own data_id, or none at all")
        seen.add(task.id)
    return found


def _task(row: Mapping[str, Any], number: int) -> Task:
    rest = {key: value for key, value in row.items() if key not in ("question", "messages", "answer", "data_id")}
    if "messages" not in row and not isinstance(row.get("question"), str):
        raise InputError(f"tasks[{number}] needs a question (text) or messages; it has: {', '.join(row)}")
    messages = row.get("messages") or ({"role": "user", "content": row["question"]},)
    return Task(str(row.get("data_id", number)), tuple(messages), row.get("answer"), rest)


def _settings(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested sections → key=value, quoted for Hydra."""
    found: list[str] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _settings(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={_quoted(value)}")
    return found


def _quoted(value: Any) -> str:
    """A value as a word of the command line. Text stays as it is: `${x}` in a Python string refers to nothing."""
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_quoted(item) for item in value) + "]"
    if isinstance(value, str):
        # OmegaConf reads \\${ as text, and halves the backslashes before it.
        return literal(re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value))
    return literal(str(value) if isinstance(value, Path) else value)

"""An evaluation's folder: its settings, its answers, and how it goes on after it was killed.

outputs/eval/DATE_TIME/
    eval.json       what is measured: a folder holds one evaluation, and others are refused
    answers.jsonl   one line per answer, written when all answers to its task are there
    results.json    results.md
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from covey.errors import InputError
from covey.evaluation.figures import Answer, Subject
from covey.redact import hide, hide_known, hide_settings
from covey.rewards import Votes
from covey.rollout.collector import Collector, unscored_is_failed
from covey.storage import lock_folder, write_atomically, writing
from covey.telemetry.jsonl import finite, read_jsonl
from covey.training.folder import missing_folders, remove_unused
from covey.types import Episode, Sampling, Task

SETTINGS_FILE, ANSWERS_FILE = "eval.json", "answers.jsonl"
SHOWN = 6  # differences that a refusal names

Key = tuple[str, str, str]  # model, task, mode


class EvalFolder:
    """Whoever holds it is the only one who writes to it."""

    def __init__(self, path: Path, settings: Mapping[str, Any], command: str) -> None:
        """Make it, or go on in it if it holds the same evaluation."""
        settings = hide_settings(json.loads(json.dumps(finite(settings), default=str)))  # as it is read back
        found = _read_settings(path)
        if found is not None and found["settings"] != settings:
            raise _other(path, found, settings)
        self._made = missing_folders(path)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = _locked(path)
        if found is None:
            write_atomically(
                path / SETTINGS_FILE, json.dumps({"command": hide(command), "settings": settings}, indent=1)
            )

    def done(self, subjects: Sequence[Subject]) -> dict[Key, set[int]]:
        """Places of the tasks that are answered in full. What is not whole (a line that was being written, a task with
        answers missing) is cut away."""
        kept: dict[Key, set[int]] = {subject.key: set() for subject in subjects}
        path = self.path / ANSWERS_FILE
        if not path.exists():
            return kept
        wanted = {subject.key: subject.n for subject in subjects}
        groups: dict[tuple[Key, int], list[Answer]] = {}
        for answer in self._read():
            groups.setdefault(((answer.model, answer.task, answer.mode), answer.index), []).append(answer)
        whole = {place: group for place, group in groups.items() if len(group) == wanted[place[0]]}
        for key, index in whole:
            kept[key].add(index)
        write_atomically(path, "".join(_line(answer) for group in whole.values() for answer in group))
        return kept

    def append(self, answers: Iterable[Answer]) -> None:
        """All answers to a task, in one write."""
        path = self.path / ANSWERS_FILE
        with writing(path), path.open("a") as file:
            file.write("".join(map(_line, answers)))

    def answers(self, subjects: Sequence[Subject]) -> dict[Key, list[Answer]]:
        """Everything that was answered, in the order of tasks and attempts, whatever the order it came in."""
        found: dict[Key, list[Answer]] = {subject.key: [] for subject in subjects}
        for answer in self._read():
            found[answer.model, answer.task, answer.mode].append(answer)
        return {key: sorted(group, key=lambda a: (a.index, a.attempt)) for key, group in found.items()}

    def _read(self) -> list[Answer]:
        path = self.path / ANSWERS_FILE
        try:
            return [Answer(**record) for record in read_jsonl(path)]
        except TypeError as error:
            raise InputError(f"{path} is damaged: {error}\n  fix: take that line out, or name a new --out") from error

    def abandon(self) -> None:
        """After a start that failed: a new folder without answers is removed."""
        remove_unused(self.path, self._made, files=(SETTINGS_FILE,))

    def close(self) -> None:
        self._lock.close()


def _line(answer: Answer) -> str:
    return hide_known(json.dumps(finite(dataclasses.asdict(answer)), default=str)) + "\n"


def _read_settings(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    if not path.is_dir():
        raise InputError(f"--out {path} is a file\n  fix: name a folder")
    if not (path / SETTINGS_FILE).is_file():
        if any(not file.name.startswith(".") for file in path.iterdir()):  # a lock alone: it was killed at its start
            raise InputError(f"--out {path} holds other things, and no evaluation\n  fix: name a new folder")
        return None
    try:
        found = json.loads((path / SETTINGS_FILE).read_text())
        if set(found) != {"command", "settings"}:
            raise ValueError("it does not say its command and settings")
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path / SETTINGS_FILE} is damaged: {error}\n  fix: name a new --out") from error
    return dict(found)


def _locked(path: Path) -> IO[str]:
    try:
        return lock_folder(path)
    except BlockingIOError:
        raise InputError(f"--out {path}: that evaluation is still running\n  fix: wait, or name another") from None


def _other(path: Path, found: Mapping[str, Any], settings: Mapping[str, Any]) -> InputError:
    there, here = _flat(found["settings"]), _flat(settings)
    keys = [key for key in dict.fromkeys([*there, *here]) if there.get(key) != here.get(key)]
    lines = [f"--out {path} holds an evaluation with other settings"]
    lines += [f"  {key}   there {there.get(key, 'nothing')}, here {here.get(key, 'nothing')}" for key in keys[:SHOWN]]
    lines += [f"  and {len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    lines.append(f"  fix: name another --out, or go on with that one:  {found['command']}")
    return InputError("\n".join(lines))


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping) or not tree:
        return {name: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{name} · {key}" if name else str(key))
    return found


# -- Asking: every task n times, several tasks at once; each is handed over when all its answers are scored ------------
# The random streams are those of an evaluation during training: named by seed, mode, task and attempt, never by what is
# asked beside them. So what is asked after a restart is answered as it would have been.


@dataclass(frozen=True)
class Measure:
    """One model on one set of tasks in one mode."""

    subject: Subject
    tasks: Sequence[Task]
    sampling: Sampling
    votes: Votes | None
    together: int | None = None  # tasks asked at once; None: all

    async def run(self, collector: Collector, done: Collection[int], hand_over: Callable[[list[Answer]], None]) -> None:
        """Ask every task that is not `done`."""
        room = asyncio.Semaphore(self.together or max(1, len(self.tasks)))

        async def ask(index: int) -> None:
            async with room:
                hand_over(await self._ask(collector, index))

        jobs = [asyncio.ensure_future(ask(index)) for index in range(len(self.tasks)) if index not in done]
        try:
            await asyncio.gather(*jobs)
        finally:  # where one ends the evaluation, the others end with it
            for job in jobs:
                job.cancel()

    async def _ask(self, collector: Collector, index: int) -> list[Answer]:
        stream = ("eval", self.subject.mode)
        (group,) = await collector.groups([self.tasks[index]], self.subject.n, self.sampling, stream)
        names = collector.reward.names
        return [
            self._answer(index, attempt, unscored_is_failed(episode, names))
            for attempt, episode in enumerate(group.episodes)
        ]

    def _answer(self, index: int, attempt: int, episode: Episode) -> Answer:
        subject, failure = self.subject, episode.failure
        said = "" if failure is not None else episode.final_answer
        return Answer(
            model=subject.model,
            task=subject.task,
            mode=subject.mode,
            index=index,
            id=episode.task.id,
            attempt=attempt,
            rewards=dict(episode.rewards),
            answer=self.votes.final(said) if self.votes is not None else said,
            tokens=episode.response_tokens,
            stop=episode.stop,
            failure=failure.cause if failure is not None else None,
            message=failure.message if failure is not None else None,
        )

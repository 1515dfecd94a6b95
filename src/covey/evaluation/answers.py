"""An evaluation's folder with its answers, and the jobs that sample them. An interrupted evaluation can be resumed.

outputs/eval/DATE_TIME/
    eval.json       the settings; a folder holds one evaluation, and another one is refused
    answers.jsonl   one line per answer, written once all answers to its task are scored
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
from covey.evaluation.scores import Answer, EvalSpec
from covey.redact import hide, hide_known, hide_settings
from covey.rewards import Votes
from covey.rollout.collector import Collector, unscored_is_failed
from covey.storage import lock_folder, write_atomically, writing
from covey.telemetry.base import flatten
from covey.telemetry.jsonl import finite, read_jsonl
from covey.training.folder import missing_folders, remove_unused
from covey.types import Episode, Sampling, Task

SETTINGS_FILE, ANSWERS_FILE = "eval.json", "answers.jsonl"
MAX_DIFFERENCES = 6  # named in an error

Key = tuple[str, str, str]  # model, task, mode


class EvalFolder:
    """The folder of an evaluation. Its lock is held until `close`."""

    def __init__(self, path: Path, settings: Mapping[str, Any], command: str) -> None:
        """Create the folder, or resume it if it has the same settings."""
        settings = hide_settings(json.loads(json.dumps(finite(settings), default=str)))  # as read from the file
        previous = _read_settings(path)
        if previous is not None and previous["settings"] != settings:
            raise _other_settings(path, previous, settings)
        self._created = missing_folders(path)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = _locked(path)
        if previous is None:
            write_atomically(
                path / SETTINGS_FILE, json.dumps({"command": hide(command), "settings": settings}, indent=1)
            )

    def done(self, specs: Sequence[EvalSpec]) -> dict[Key, set[int]]:
        """Indices of the tasks with all their answers. Other lines are removed from the file."""
        done: dict[Key, set[int]] = {spec.key: set() for spec in specs}
        path = self.path / ANSWERS_FILE
        if not path.exists():
            return done
        expected = {spec.key: spec.n for spec in specs}
        groups: dict[tuple[Key, int], list[Answer]] = {}
        for answer in self._read():
            groups.setdefault(((answer.model, answer.task, answer.mode), answer.index), []).append(answer)
        complete = {key: group for key, group in groups.items() if len(group) == expected[key[0]]}
        for key, index in complete:
            done[key].add(index)
        write_atomically(path, "".join(_line(answer) for group in complete.values() for answer in group))
        return done

    def append(self, answers: Iterable[Answer]) -> None:
        """Write all answers to a task at once."""
        path = self.path / ANSWERS_FILE
        with writing(path), path.open("a") as file:
            file.write("".join(map(_line, answers)))

    def answers(self, specs: Sequence[EvalSpec]) -> dict[Key, list[Answer]]:
        """All answers, sorted by task and attempt."""
        answers: dict[Key, list[Answer]] = {spec.key: [] for spec in specs}
        for answer in self._read():
            answers[answer.model, answer.task, answer.mode].append(answer)
        return {key: sorted(group, key=lambda a: (a.index, a.attempt)) for key, group in answers.items()}

    def _read(self) -> list[Answer]:
        path = self.path / ANSWERS_FILE
        try:
            return [Answer(**record) for record in read_jsonl(path)]
        except TypeError as error:
            raise InputError(f"{path} is damaged: {error}\n  fix: remove that line, or give a new --out") from error

    def abandon(self) -> None:
        """Remove a folder that was created for a start that failed."""
        remove_unused(self.path, self._created, files=(SETTINGS_FILE,))

    def close(self) -> None:
        self._lock.close()


def _line(answer: Answer) -> str:
    return hide_known(json.dumps(finite(dataclasses.asdict(answer)), default=str)) + "\n"


def _read_settings(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    if not path.is_dir():
        raise InputError(f"--out {path} is a file\n  fix: give a folder")
    if not (path / SETTINGS_FILE).is_file():
        # A lock without other files is left by a killed start.
        if any(not file.name.startswith(".") for file in path.iterdir()):
            raise InputError(f"--out {path} has other files and no evaluation\n  fix: give a new folder")
        return None
    try:
        data = json.loads((path / SETTINGS_FILE).read_text())
        if set(data) != {"command", "settings"}:
            raise ValueError("command or settings is missing")
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path / SETTINGS_FILE} is damaged: {error}\n  fix: give a new --out") from error
    return dict(data)


def _locked(path: Path) -> IO[str]:
    try:
        return lock_folder(path)
    except BlockingIOError:
        raise InputError(f"--out {path}: that evaluation is still running\n  fix: wait, or give another") from None


def _other_settings(path: Path, previous: Mapping[str, Any], settings: Mapping[str, Any]) -> InputError:
    there, here = flatten(previous["settings"], separator=" · "), flatten(settings, separator=" · ")
    keys = [key for key in dict.fromkeys([*there, *here]) if there.get(key) != here.get(key)]
    lines = [f"--out {path} holds an evaluation with other settings"]
    lines += [
        f"  {key}   there {there.get(key, 'nothing')}, here {here.get(key, 'nothing')}"
        for key in keys[:MAX_DIFFERENCES]
    ]
    lines += [f"  and {len(keys) - MAX_DIFFERENCES} more"] if len(keys) > MAX_DIFFERENCES else []
    lines.append(f"  fix: give another --out, or resume that one:  {previous['command']}")
    return InputError("\n".join(lines))


@dataclass(frozen=True)
class EvalJob:
    """One model on one set of tasks in one mode: n answers to every task.

    The random streams are those of an evaluation during training: named by seed, mode, task and attempt. So a resumed
    evaluation samples the same answers.
    """

    spec: EvalSpec
    tasks: Sequence[Task]
    sampling: Sampling
    votes: Votes | None
    batch_size: int | None = None  # tasks sampled concurrently; None: all

    async def run(self, collector: Collector, done: Collection[int], submit: Callable[[list[Answer]], None]) -> None:
        """Sample every task that is not `done`, and submit its answers once all of them are scored."""
        limit = asyncio.Semaphore(self.batch_size or max(1, len(self.tasks)))

        async def sample(index: int) -> None:
            async with limit:
                submit(await self._sample(collector, index))

        jobs = [asyncio.ensure_future(sample(index)) for index in range(len(self.tasks)) if index not in done]
        try:
            await asyncio.gather(*jobs)
        finally:  # an error in one cancels the others
            for job in jobs:
                job.cancel()

    async def _sample(self, collector: Collector, index: int) -> list[Answer]:
        stream = ("eval", self.spec.mode)
        (group,) = await collector.groups([self.tasks[index]], self.spec.n, self.sampling, stream)
        names = collector.reward.names
        return [
            self._answer(index, attempt, unscored_is_failed(episode, names))
            for attempt, episode in enumerate(group.episodes)
        ]

    def _answer(self, index: int, attempt: int, episode: Episode) -> Answer:
        spec, failure = self.spec, episode.failure
        final = "" if failure is not None else episode.final_answer
        return Answer(
            model=spec.model,
            task=spec.task,
            mode=spec.mode,
            index=index,
            id=episode.task.id,
            attempt=attempt,
            rewards=dict(episode.rewards),
            answer=self.votes.final(final) if self.votes is not None else final,
            tokens=episode.response_tokens,
            stop=episode.stop,
            failure=failure.cause if failure is not None else None,
            message=failure.message if failure is not None else None,
        )

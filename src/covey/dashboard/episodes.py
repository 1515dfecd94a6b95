"""An index of episodes.jsonl: the offset of each episode and the values that it is filtered and sorted by.

The file may have gigabytes, in several parts. The index takes about a hundred bytes per episode; text is read from the
file when it is displayed. Lines are not parsed whole: the indexed values stand before the token rows, and tokens are
counted by their mask.
"""

from __future__ import annotations

import json
import mmap
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from covey.dashboard.metrics import Tail
from covey.images import has_images, plain_text
from covey.telemetry.jsonl import EPISODES_FILE, parts_of

CHUNK = 4 << 20  # bytes indexed at a time
PREVIEW = 120  # characters of a question or a reply in the list
ROWS, MASK = b', "rows": [', b'"mask": ['
NOT_SCORED = float("nan")
NUMBERS = ("step", "group", "attempt", "reward", "advantage", "length", "turns", "tool_errors")

# Raised while parsing a line that is not an episode.
PARSE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Query:
    """Filters of the list. None and empty strings match anything."""

    task: str = ""  # part of a task's id or question
    text: str = ""  # part of a message
    stop: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: float | None = None
    max_length: float | None = None
    first_step: float | None = None
    last_step: float | None = None
    tool_errors: bool = False  # only episodes with tool errors
    failed: bool = False  # only failed episodes
    sort: str = "step"  # one of NUMBERS
    descending: bool = True


class StringTable:
    """Numbers for strings that repeat."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._number: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self._number:
            self._number[name] = len(self.all)
            self.all.append(name)
        return self._number[name]


@dataclass(frozen=True, slots=True)
class Entry:
    """The indexed values of a line. Parsed completely before anything is added to the index."""

    task: str
    question: str
    numbers: dict[str, float]
    rewards: dict[str, float]
    stop: str
    failed: bool

    @classmethod
    def parse(cls, line: bytes) -> Entry:
        """Raises one of PARSE_ERRORS if the line is not an episode."""
        head = _head(line)
        user = [m for m in head["messages"] if m.get("role") == "user"]
        values = {name: head[name] for name in ("step", "group", "attempt", "advantage", "length")}
        values["reward"] = head["total_reward"]
        values["turns"] = sum(m.get("role") == "assistant" for m in head["messages"])
        values["tool_errors"] = sum(use["error"] is not None for use in head.get("tools", ()))
        return cls(
            str(head["task_id"]),
            _plain(user[-1].get("content"))[:PREVIEW] if user else "",
            {name: _float(value) for name, value in values.items()},
            {name: _float(value) for name, value in head["rewards"].items()},
            str(head["stop"] or "none"),
            head["failure"] is not None,
        )


class EpisodeIndex:
    def __init__(self, folder: Path) -> None:
        self._path = folder / EPISODES_FILE
        self._cuts = 0
        self._clear()

    def _clear(self) -> None:
        self._tails: list[Tail] = []  # one per part
        self.parts, self.offsets, self.sizes = array("i"), array("q"), array("q")
        self.numbers = {name: array("d") for name in NUMBERS}
        self.rewards: dict[str, array[float]] = {}
        self.tasks, self.stops = StringTable(), StringTable()
        self.task, self.stop, self.failure = array("i"), array("i"), array("b")
        self.questions: list[str] = []  # by the number of the task
        self.broken = 0  # skipped lines that are not episodes

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def version(self) -> tuple[int, int]:
        return self._cuts, len(self)

    @property
    def indexed(self) -> float:
        """The share of the file that is indexed."""
        size = sum(tail.size for tail in self._tails)
        return sum(tail.offset for tail in self._tails) / size if size else 1.0

    def poll(self, limit: int = CHUNK) -> bool:
        """Index the next chunk of new lines; returns whether there were any."""
        before = self.version
        if any(tail.was_cut() for tail in self._tails):  # the run was resumed from a checkpoint: start again
            self._cuts += 1
            self._clear()
        self._tails += [Tail(path) for path in parts_of(self._path)[len(self._tails) :]]
        for part, tail in enumerate(self._tails):
            for offset, line in tail.lines(limit):
                try:
                    self._add(Entry.parse(line), part, offset, len(line))
                except PARSE_ERRORS:
                    self.broken += 1
                limit -= len(line)
        return self.version != before

    def column(self, name: str) -> Floats:
        """A number of every episode, or a reward (`reward:NAME`)."""
        if name.startswith("reward:"):
            return np.array(self.rewards[name.removeprefix("reward:")], dtype=np.float64)
        return np.array(self.numbers[name], dtype=np.float64)

    def names(self) -> list[str]:
        """The columns of the scatter plot."""
        return [*(f"reward:{name}" for name in self.rewards), *NUMBERS]

    def find(self, query: Query) -> Indices:
        """The matching episodes, sorted."""
        matches = np.ones(len(self), dtype=bool)
        bounds = (
            ("reward", query.min_reward, query.max_reward),
            ("length", query.min_length, query.max_length),
            ("step", query.first_step, query.last_step),
        )
        for name, low, high in bounds:
            if low is not None:
                matches &= self.column(name) >= low
            if high is not None:
                matches &= self.column(name) <= high
        if query.task:
            matches &= np.isin(np.array(self.task), self._tasks_with(query.task))
        if query.stop:
            matches &= np.array(self.stop) == (self.stops.all.index(query.stop) if query.stop in self.stops.all else -1)
        if query.tool_errors:
            matches &= self.column("tool_errors") > 0
        if query.failed:
            matches &= np.array(self.failure) > 0
        if query.text and matches.any():
            matches &= self._with_text(query.text)
        indices = np.flatnonzero(matches)
        keys = self.column(query.sort)[indices]
        order = np.argsort(-keys if query.descending else keys, kind="stable")  # NaN comes last either way
        return indices[order]

    def related(self, index: int, *, group: bool) -> list[int]:
        """The attempts of the same group, or all recorded episodes of the same task."""
        same = np.array(self.task) == self.task[index]
        if group:
            same &= self.column("step") == self.numbers["step"][index]
            same &= self.column("group") == self.numbers["group"][index]
        return [int(other) for other in np.flatnonzero(same)]

    def row(self, index: int) -> dict[str, Any]:
        """A line of the list."""
        row: dict[str, Any] = {}
        for name in NUMBERS:
            value = self.numbers[name][index]
            row[name] = value if value == value else None
        task = self.task[index]
        row |= {"id": index, "task": self.tasks.all[task], "stop": self.stops.all[self.stop[index]]}
        row |= {"failed": bool(self.failure[index]), "question": self.questions[task]}
        replies = [m for m in _head(self._line(index))["messages"] if m.get("role") == "assistant"]
        row["reply"] = _plain(replies[-1].get("content"))[:PREVIEW] if replies else ""
        return row

    def read(self, index: int) -> dict[str, Any]:
        """The whole episode."""
        episode: dict[str, Any] = json.loads(self._line(index))
        return episode | {"id": index}

    def _add(self, entry: Entry, part: int, offset: int, size: int) -> None:
        task = self.tasks.number(entry.task)
        if task == len(self.questions):
            self.questions.append(entry.question)
        for name, column in self.numbers.items():
            column.append(entry.numbers[name])
        for name in entry.rewards:
            if name not in self.rewards:
                self.rewards[name] = array("d", [NOT_SCORED] * len(self))
        for name, column in self.rewards.items():
            column.append(entry.rewards.get(name, NOT_SCORED))
        self.task.append(task)
        self.stop.append(self.stops.number(entry.stop))
        self.failure.append(entry.failed)
        self.parts.append(part)
        self.offsets.append(offset)
        self.sizes.append(size)

    def _tasks_with(self, text: str) -> list[int]:
        """The numbers of tasks with the text in their id or question."""
        text = text.lower()
        pairs = enumerate(zip(self.tasks.all, self.questions, strict=True))
        return [number for number, (name, question) in pairs if text in name.lower() or text in question.lower()]

    def _with_text(self, text: str) -> NDArray[np.bool_]:
        """Which episodes contain the exact text: one scan of the parts, without parsing."""
        matches = np.zeros(len(self), dtype=bool)
        needle = json.dumps(text)[1:-1].encode()
        ends = np.searchsorted(np.array(self.parts), np.arange(len(self._tails) + 1))
        for tail, first, last in zip(self._tails, ends[:-1], ends[1:], strict=True):
            if first < last:
                matches[first:last] = self._scan(tail.path, needle, int(first), int(last))
        return matches

    def _scan(self, path: Path, needle: bytes, first: int, last: int) -> NDArray[np.bool_]:
        """Which of the episodes `first` to `last`, all in one part, contain the bytes."""
        matches = np.zeros(last - first, dtype=bool)
        offsets, end = np.array(self.offsets[first:last]), self.offsets[last - 1] + self.sizes[last - 1]
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(needle, 0, end)
            while at >= 0:
                index = int(np.searchsorted(offsets, at, side="right")) - 1
                matches[index] = True
                at = data.find(needle, self.offsets[first + index] + self.sizes[first + index], end)
        return matches

    def _line(self, index: int) -> bytes:
        with self._tails[self.parts[index]].path.open("rb") as file:
            file.seek(self.offsets[index])
            return file.read(self.sizes[index])


def _head(line: bytes) -> dict[str, Any]:
    """The fields before the token rows, and `length`, the number of sampled tokens.

    Quotation marks inside JSON strings are escaped, so ROWS is never found inside text. If it first occurs inside the
    nested `answer`, the text before it is not valid JSON, and the whole line is parsed.
    """
    cut = line.find(ROWS)
    if cut >= 0:
        try:
            head: dict[str, Any] = json.loads(line[:cut] + b"}")
        except ValueError:
            pass
        else:
            return head | {"length": _sampled(line, cut)}
    head = json.loads(line)
    return head | {"length": sum(sum(row["mask"]) for row in head["rows"])}


def _sampled(line: bytes, start: int) -> int:
    """The number of ones in all masks."""
    total, at = 0, line.find(MASK, start)
    while at >= 0:
        end = line.index(b"]", at)
        total += line.count(b"1", at, end)
        at = line.find(MASK, end)
    return total


def _float(value: Any) -> float:
    return NOT_SCORED if value is None else float(value)


def _plain(content: Any) -> str:
    if has_images(content):
        return plain_text(content)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)

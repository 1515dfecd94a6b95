"""episodes.jsonl as an index: where each episode lies, and the few numbers it is found by.

The file may have gigabytes, in parts. Memory holds about a hundred bytes an episode; the text stays in the file and is
read when somebody looks. A line is not parsed whole: what it is found by stands before its token rows, and tokens are
counted by the commas of their lists.
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
from covey.telemetry.jsonl import EPISODES_FILE, parts_of

CHUNK = 4 << 20  # bytes indexed at a time, before others get their turn
PREVIEW = 120  # characters of a question or a reply in the list
ROWS, MASK = b', "rows": [', b'"mask": ['
NOT_SCORED = float("nan")
NUMBERS = ("step", "group", "attempt", "reward", "advantage", "length", "turns", "tool_errors")

# What a line that is no episode raises on its way into the index.
WRONG = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Query:
    """What the list is filtered by; None: anything."""

    task: str = ""  # part of a task's id or question
    text: str = ""  # said in a message
    stop: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: float | None = None
    max_length: float | None = None
    first_step: float | None = None
    last_step: float | None = None
    tool_errors: bool = False  # only those with some
    failed: bool = False
    sort: str = "step"  # one of NUMBERS
    descending: bool = True


class Names:
    """Strings that repeat, by number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._number: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self._number:
            self._number[name] = len(self.all)
            self.all.append(name)
        return self._number[name]


@dataclass(frozen=True, slots=True)
class Found:
    """What the index keeps of a line. Read whole before anything is kept, so that a broken line leaves no trace."""

    task: str
    question: str
    numbers: dict[str, float]
    rewards: dict[str, float]
    stop: str
    failed: bool

    @classmethod
    def of(cls, line: bytes) -> Found:
        """Raises one of WRONG where the line is no episode."""
        head = _head(line)
        asked = [m for m in head["messages"] if m.get("role") == "user"]
        values = {name: head[name] for name in ("step", "group", "attempt", "advantage", "length")}
        values["reward"] = head["total_reward"]
        values["turns"] = sum(m.get("role") == "assistant" for m in head["messages"])
        values["tool_errors"] = sum(use["error"] is not None for use in head.get("tools", ()))
        return cls(
            str(head["task_id"]),
            _plain(asked[-1].get("content"))[:PREVIEW] if asked else "",
            {name: _float(value) for name, value in values.items()},
            {name: _float(value) for name, value in head["rewards"].items()},
            str(head["stop"] or "none"),
            head["failure"] is not None,
        )


class Episodes:
    def __init__(self, folder: Path) -> None:
        self._path = folder / EPISODES_FILE
        self._cuts = 0
        self._clear()

    def _clear(self) -> None:
        self._tails: list[Tail] = []  # of the parts
        self.parts, self.offsets, self.sizes = array("i"), array("q"), array("q")
        self.numbers = {name: array("d") for name in NUMBERS}
        self.rewards: dict[str, array[float]] = {}
        self.tasks, self.stops = Names(), Names()
        self.task, self.stop, self.failure = array("i"), array("i"), array("b")
        self.questions: list[str] = []  # by the task's number
        self.broken = 0  # lines that are no episodes: left out

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def version(self) -> tuple[int, int]:
        return self._cuts, len(self)

    @property
    def indexed(self) -> float:
        """The share of the file that is in the index."""
        size = sum(tail.size for tail in self._tails)
        return sum(tail.offset for tail in self._tails) / size if size else 1.0

    def poll(self, limit: int = CHUNK) -> bool:
        """Index what is new, a chunk of it; whether anything was."""
        before = self.version
        if any(tail.was_cut() for tail in self._tails):  # a resumed run has cut its record: begin again
            self._cuts += 1
            self._clear()
        self._tails += [Tail(path) for path in parts_of(self._path)[len(self._tails) :]]
        for part, tail in enumerate(self._tails):
            for offset, line in tail.lines(limit):
                try:
                    self._add(Found.of(line), part, offset, len(line))
                except WRONG:
                    self.broken += 1
                limit -= len(line)
        return self.version != before

    def column(self, name: str) -> Floats:
        """A number of every episode, or a reward (`reward:NAME`)."""
        if name.startswith("reward:"):
            return np.array(self.rewards[name.removeprefix("reward:")], dtype=np.float64)
        return np.array(self.numbers[name], dtype=np.float64)

    def names(self) -> list[str]:
        """Columns that can be drawn against each other."""
        return [*(f"reward:{name}" for name in self.rewards), *NUMBERS]

    def find(self, query: Query) -> Places:
        """Places of the episodes that fit, in order."""
        fits = np.ones(len(self), dtype=bool)
        bounds = (
            ("reward", query.min_reward, query.max_reward),
            ("length", query.min_length, query.max_length),
            ("step", query.first_step, query.last_step),
        )
        for name, low, high in bounds:
            if low is not None:
                fits &= self.column(name) >= low
            if high is not None:
                fits &= self.column(name) <= high
        if query.task:
            fits &= np.isin(np.array(self.task), self._tasks_like(query.task))
        if query.stop:
            fits &= np.array(self.stop) == (self.stops.all.index(query.stop) if query.stop in self.stops.all else -1)
        if query.tool_errors:
            fits &= self.column("tool_errors") > 0
        if query.failed:
            fits &= np.array(self.failure) > 0
        if query.text and fits.any():
            fits &= self._saying(query.text)
        places = np.flatnonzero(fits)
        keys = self.column(query.sort)[places]
        order = np.argsort(-keys if query.descending else keys, kind="stable")  # NaN comes last either way
        return places[order]

    def like(self, place: int, *, group: bool) -> list[int]:
        """The attempts of the same group; or everything recorded of the same task, across steps."""
        same = np.array(self.task) == self.task[place]
        if group:
            same &= (self.column("step") == self.numbers["step"][place]) & (
                self.column("group") == self.numbers["group"][place]
            )
        return [int(found) for found in np.flatnonzero(same)]

    def row(self, place: int, *, reply: bool = True) -> dict[str, Any]:
        """A line of the list."""
        found: dict[str, Any] = {name: _number(self.numbers[name][place]) for name in NUMBERS}
        task = self.task[place]
        found |= {"id": place, "task": self.tasks.all[task], "stop": self.stops.all[self.stop[place]]}
        found |= {"failed": bool(self.failure[place]), "question": self.questions[task]}
        if reply:
            said = [m for m in _head(self._line(place))["messages"] if m.get("role") == "assistant"]
            found["reply"] = _plain(said[-1].get("content"))[:PREVIEW] if said else ""
        return found

    def read(self, place: int) -> dict[str, Any]:
        """A whole episode."""
        found: dict[str, Any] = json.loads(self._line(place))
        return found | {"id": place}

    def _add(self, found: Found, part: int, offset: int, size: int) -> None:
        task = self.tasks.number(found.task)
        if task == len(self.questions):
            self.questions.append(found.question)
        for name, column in self.numbers.items():
            column.append(found.numbers[name])
        for name in found.rewards:
            if name not in self.rewards:
                self.rewards[name] = array("d", [NOT_SCORED] * len(self))
        for name, column in self.rewards.items():
            column.append(found.rewards.get(name, NOT_SCORED))
        self.task.append(task)
        self.stop.append(self.stops.number(found.stop))
        self.failure.append(found.failed)
        self.parts.append(part)
        self.offsets.append(offset)
        self.sizes.append(size)

    def _tasks_like(self, part: str) -> list[int]:
        part = part.lower()
        pairs = enumerate(zip(self.tasks.all, self.questions, strict=True))
        return [number for number, (name, asked) in pairs if part in name.lower() or part in asked.lower()]

    def _saying(self, text: str) -> NDArray[np.bool_]:
        """The episodes with these exact words in them: one scan of the parts, without parsing them."""
        found = np.zeros(len(self), dtype=bool)
        needle = json.dumps(text)[1:-1].encode()
        ends = np.searchsorted(np.array(self.parts), np.arange(len(self._tails) + 1))
        for tail, first, last in zip(self._tails, ends[:-1], ends[1:], strict=True):
            if first < last:
                found[first:last] = self._found_in(tail.path, needle, int(first), int(last))
        return found

    def _found_in(self, path: Path, needle: bytes, first: int, last: int) -> NDArray[np.bool_]:
        """Which of the episodes `first` to `last`, all of one part, hold the bytes."""
        found = np.zeros(last - first, dtype=bool)
        offsets, end = np.array(self.offsets[first:last]), self.offsets[last - 1] + self.sizes[last - 1]
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(needle, 0, end)
            while at >= 0:
                place = int(np.searchsorted(offsets, at, side="right")) - 1
                found[place] = True
                at = data.find(needle, self.offsets[first + place] + self.sizes[first + place], end)
        return found

    def _line(self, place: int) -> bytes:
        with self._tails[self.parts[place]].path.open("rb") as file:
            file.seek(self.offsets[place])
            return file.read(self.sizes[place])


def _head(line: bytes) -> dict[str, Any]:
    """What stands before the token rows, and `length`, the number of sampled tokens.

    A quotation mark inside a JSON string is escaped, so the marks are not found inside text; where the first one lies
    inside the answer's own structure, what stands before it is no JSON, and the line is parsed whole.
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
    total, at = 0, line.find(MASK, start)
    while at >= 0:
        end = line.index(b"]", at)
        total += line.count(b"1", at, end)
        at = line.find(MASK, end)
    return total


def _float(value: Any) -> float:
    return NOT_SCORED if value is None else float(value)


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def _number(value: float) -> float | None:
    return value if value == value else None

"""A long file of JSON lines in parts: episodes.jsonl, and when that is full episodes-0001.jsonl, episodes-0002.jsonl, …

A part that is full is left alone from then on: it can be copied while the run goes on. Places in the record are counted
over all parts as if they were one file: a checkpoint remembers one number.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from covey.errors import InputError
from covey.redact import hide_known
from covey.storage import writing
from covey.telemetry.base import EpisodeView, Sink
from covey.types import Episode, RewardTable, Sample

PART_BYTES = 256 << 20  # a part takes no further line from here on


def parts_of(path: Path) -> list[Path]:
    """The parts that exist, in order; `path` is the first."""
    found = [path] if path.exists() else []
    while found and (following := _part(path, len(found))).exists():
        found.append(following)
    return found


def size_of(path: Path) -> int:
    """Bytes of all parts."""
    return sum(part.stat().st_size for part in parts_of(path))


def whole_lines(path: Path) -> int:
    """Bytes of all parts without a last line that was not written to its end."""
    size = size_of(path)
    if not size:
        return 0
    with parts_of(path)[-1].open("rb") as file:
        tail = file.read()
    return size - (len(tail) - tail.rfind(b"\n") - 1)


class PartWriter:
    """Appends lines after the first `offset` bytes of the record; what stood behind them is cut away."""

    def __init__(self, path: Path, offset: int, part_bytes: int = PART_BYTES) -> None:
        self._path, self._part_bytes = path, part_bytes
        self._number, self._before = _cut(path, offset)
        self._open("ab")

    def write(self, line: bytes) -> None:
        """All of it, or nothing: what a full disk took of a line is cut off again."""
        if self._size >= self._part_bytes:
            self._next()
        with writing(self._here, needs=len(line)):
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(self._size)
                raise
        self._size += len(line)

    def synced(self) -> int:
        """Bytes of all parts, once they are safely on the disk."""
        with writing(self._here):
            os.fsync(self._file.fileno())
        return self._before + self._size

    def close(self) -> None:
        self._file.close()

    def _next(self) -> None:
        self._before = self.synced()
        self._file.close()
        self._number += 1
        self._open("wb")

    def _open(self, mode: str) -> None:
        """Nothing is held back in this process: what is written is in the file, and closing it cannot fail for it."""
        self._here = _part(self._path, self._number)
        with writing(self._here):
            self._file = FileIO(self._here, mode)
        self._size = self._file.seek(0, os.SEEK_END)


def copy_record(source: Path, target: Path, size: int) -> None:
    """The first `size` bytes of a record, in the same parts."""
    require_size(source, size)
    rest = size
    for number, part in enumerate(parts_of(source)):
        if number and not rest:
            break
        copy = _part(target, number)
        with part.open("rb") as old, writing(copy, needs=rest), copy.open("wb") as new:
            while rest and (chunk := old.read(min(rest, 1 << 20))):
                new.write(chunk)
                rest -= len(chunk)


def require_size(path: Path, size: int) -> None:
    """A record that a checkpoint was written behind must have at least the bytes of then."""
    if (found := size_of(path)) < size:
        raise InputError(
            f"{path}: {found} bytes, but the checkpoint was written when it had {size}\n"
            "  the file was cut or replaced since; start a new run with resume=disable"
        )


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:04d}{path.suffix}") if number else path


def _cut(path: Path, offset: int) -> tuple[int, int]:
    """Cut the record to `offset` bytes; the number of the part that is last now, and the bytes before it."""
    parts, before, last = parts_of(path), 0, 0
    for number, part in enumerate(parts[:-1]):
        size = part.stat().st_size
        if before + size >= offset:
            break
        before, last = before + size, number + 1
    for part in reversed(parts[last + 1 :]):  # from the end: a kill in between leaves no gap
        part.unlink()
    if parts:
        os.truncate(parts[last], offset - before)
    return last, before


# -- metrics.jsonl and episodes.jsonl: the record that is always kept, and that everything else can be drawn from ------
# A resumed run cuts both files back to where its checkpoint left them, so that they end without gaps or repeats; half a
# line that a killed process left goes with the rest. Episodes grow large: their file goes on in further parts.

Read = TypeVar("Read")

METRICS_FILE = "metrics.jsonl"
EPISODES_FILE = "episodes.jsonl"
LAST_STEP = 1 << 53  # beyond it floats, which charts are made of, cannot tell steps apart


class JsonlFiles(Sink):
    """Both files of a run. Each record is flushed, so that other programs can follow; `offsets` also syncs."""

    def __init__(
        self,
        folder: Path,
        metrics_offset: int | None = None,
        episodes_offset: int | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        metrics, episodes = folder / METRICS_FILE, folder / EPISODES_FILE
        # Both are checked before either is cut: a refusal leaves the folder as it was.
        require_size(metrics, metrics_offset or 0)
        require_size(episodes, episodes_offset or 0)
        # A step's numbers are a few kilobytes: metrics stay in one file, whatever the length of the run.
        self._metrics = PartWriter(metrics, metrics_offset or 0, part_bytes=sys.maxsize)
        self._episodes = PartWriter(episodes, episodes_offset or 0, part_bytes)

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        for episode in episodes:
            self._episodes.write(_line(episode))
        self._write_metrics("step", index, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self._write_metrics("eval", step, metrics)

    def offsets(self) -> tuple[int, int]:
        """Sizes of the two records, once they are safely on the disk; of the episodes, all parts together."""
        return self._metrics.synced(), self._episodes.synced()

    def close(self, status: str) -> None:
        self._metrics.close()
        self._episodes.close()

    def _write_metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write(_line({"kind": kind, "step": step, "metrics": dict(sorted(metrics.items()))}))


def read_lines(path: Path, read: Callable[[bytes], Read]) -> Iterator[Read]:
    """The records of a file. A last line without its line break is still being written (or never will be): left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                found = read(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not JSON ({error})") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}, line {number}: {error}") from error
            yield found


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    return read_lines(path, json.loads)


def read_record(line: bytes) -> tuple[str, int, dict[str, float | None]]:
    """A line of metrics.jsonl: its kind (step or eval), its step and its numbers. ValueError: it is no such line."""
    try:
        record = json.loads(line)
        kind, step, metrics = record["kind"], record["step"], record["metrics"]
        if kind not in ("step", "eval") or type(step) is not int or abs(step) > LAST_STEP:
            raise ValueError(f"kind {kind!r:.20} and step {step!r:.20} are none of a run's")
        found = {name: None if value is None else float(value) for name, value in metrics.items()}
        "".join(found).encode()
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a record of metrics: {type(error).__name__}: {error!s:.80}") from None
    return kind, step, found


def finite(value: Any) -> Any:
    """The same value with None for every NaN and infinity, which JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _line(record: Mapping[str, Any]) -> bytes:
    # Data sets bring answers of any type (dates, decimals): what JSON does not know is written as text.
    return hide_known(json.dumps(finite(record), allow_nan=False, default=str)).encode("ascii") + b"\n"


# -- episodes.jsonl: one JSON object per recorded episode, with what happened at every token ---------------------------
# The schema is described in docs/metrics.md. A change that an old reader would misread raises SCHEMA.

SCHEMA = 1

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class TokenRow:
    """A token row and what the learner saw at each of its response tokens (no padding)."""

    sample: Sample
    advantage: Sequence[float]
    ratio: Sequence[float]
    entropy: Sequence[float]

    def __post_init__(self) -> None:
        row = self.sample
        columns = (row.mask, row.logprobs, row.versions, self.advantage, self.ratio, self.entropy)
        lengths = [len(column) for column in columns]
        assert all(length == len(row.response_ids) for length in lengths), (
            f"{len(row.response_ids)} response tokens, but mask, logprobs, versions, advantage, ratio, entropy "
            f"have {lengths}"
        )


def episode_record(
    *,
    step: int,
    task_id: str,
    group: int,
    attempt: int,
    episode: Episode,
    rewards: RewardTable,
    total_reward: float | None,
    advantage: float | None,
    tokens: Sequence[TokenRow],
    decode: Decode,
) -> dict[str, Any]:
    """One line of the file. `group` and `attempt` count from 0 within the step and the group."""
    failure = episode.failure
    return {
        "schema": SCHEMA,
        "step": step,
        "task_id": task_id,
        "group": group,
        "attempt": attempt,
        "messages": [dict(message) for message in episode.messages],
        "answer": episode.task.answer,
        "rewards": dict(rewards),
        "total_reward": total_reward,
        "advantage": advantage,
        "stop": str(episode.stop) if episode.stop is not None else None,
        "failure": {"cause": failure.cause, "message": failure.message} if failure is not None else None,
        "tools": [{"tool": use.tool, "error": use.error} for use in episode.tools],
        "rows": [_row(row, decode) for row in tokens],
    }


def _row(row: TokenRow, decode: Decode) -> dict[str, Any]:
    sample = row.sample
    return {
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "mask": [int(sampled) for sampled in sample.mask],
        # Token by token: part of a UTF-8 character has no text of its own and stays U+FFFD.
        "text": [decode([token]) for token in sample.response_ids],
        "prompt_text": decode(list(sample.prompt_ids)),
        "logprobs": list(sample.logprobs),
        "advantage": list(row.advantage),
        "ratio": list(row.ratio),
        "entropy": list(row.entropy),
        "versions": list(sample.versions),
    }


def read_episodes(path: Path) -> Iterator[dict[str, Any]]:
    """The episodes of a record, in the order they were written; `path` is its first part, the others follow.

    Numbers that were not finite are None.
    """
    for part in parts_of(path) or [path]:  # where there is none, opening it says so
        for record in read_jsonl(part):
            if record.get("schema") != SCHEMA:
                raise InputError(
                    f"{part}: episode schema {record.get('schema')}, but this version of covey reads {SCHEMA}"
                )
            yield record

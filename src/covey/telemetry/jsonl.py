"""metrics.jsonl and episodes.jsonl: the record of a run, written and read.

A resumed run truncates both files to the offsets in its checkpoint, so they have no gaps, repeats or half lines.
episodes.jsonl grows large and is split into parts: episodes.jsonl, episodes-0001.jsonl, episodes-0002.jsonl, … A full
part is never written to again, so it can be copied while the run continues. Offsets count over all parts as if they
were one file.

The schema of both files is described in docs/metrics.md.
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
from typing import Any

from covey.errors import InputError
from covey.images import has_images, is_image, load, suffix_of
from covey.redact import hide_known
from covey.storage import write_atomically, writing
from covey.telemetry.base import EpisodeRecords, EpisodeView, Metrics, Sink
from covey.types import Episode, Messages, RewardTable, Sample

METRICS_FILE = "metrics.jsonl"
EPISODES_FILE = "episodes.jsonl"
IMAGES = "images"  # the folder of pictures that episodes refer to, by the hash of their content
PART_BYTES = 256 << 20  # from this size on, lines go to the next part
MAX_STEP = 1 << 53  # beyond it, floats cannot represent every step
SCHEMA = 1  # version of an episode record; incremented by changes that an older reader would misread

Decode = Callable[[list[int]], str]


# -- Files in parts ----------------------------------------------------------------------------------------------------


def parts_of(path: Path) -> list[Path]:
    """The existing parts in order; `path` is the first."""
    parts = [path] if path.exists() else []
    while parts and (following := _part(path, len(parts))).exists():
        parts.append(following)
    return parts


def size_of(path: Path) -> int:
    """Bytes of all parts."""
    return sum(part.stat().st_size for part in parts_of(path))


def whole_lines(path: Path) -> int:
    """Bytes of all parts without an incomplete last line."""
    size = size_of(path)
    if not size:
        return 0
    with parts_of(path)[-1].open("rb") as file:
        tail = file.read()
    return size - (len(tail) - tail.rfind(b"\n") - 1)


class PartWriter:
    """Truncates the file to its first `offset` bytes and appends lines from there."""

    def __init__(self, path: Path, offset: int, part_bytes: int = PART_BYTES) -> None:
        self._path, self._part_bytes = path, part_bytes
        self._number, self._before = _cut(path, offset)
        self._open("ab")

    def write(self, line: bytes) -> None:
        """Write the whole line or nothing: after an error (such as a full disk) the partial line is removed."""
        if self._size >= self._part_bytes:
            self._before = self.synced()
            self._file.close()
            self._number += 1
            self._open("wb")
        with writing(self._part_path, needs=len(line)):
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
        """Sync to disk; returns the bytes of all parts."""
        with writing(self._part_path):
            os.fsync(self._file.fileno())
        return self._before + self._size

    def close(self) -> None:
        self._file.close()

    def _open(self, mode: str) -> None:
        """Open without a buffer, so that every write reaches the system at once and closing cannot fail."""
        self._part_path = _part(self._path, self._number)
        with writing(self._part_path):
            self._file = FileIO(self._part_path, mode)
        self._size = self._file.seek(0, os.SEEK_END)


def copy_record(source: Path, target: Path, size: int) -> None:
    """Copy the first `size` bytes, in the same parts."""
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
    """Raise an error if the file is shorter than it was when the checkpoint was written."""
    if (actual := size_of(path)) < size:
        raise InputError(
            f"{path}: {actual} bytes, but the checkpoint was written when it had {size}\n"
            "  the file was truncated or replaced since; start a new run with resume=disable"
        )


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:04d}{path.suffix}") if number else path


def _cut(path: Path, offset: int) -> tuple[int, int]:
    """Truncate to `offset` bytes; returns the number of the last part and the bytes before it."""
    parts, before, last = parts_of(path), 0, 0
    for number, part in enumerate(parts[:-1]):
        size = part.stat().st_size
        if before + size >= offset:
            break
        before, last = before + size, number + 1
    for part in reversed(parts[last + 1 :]):  # from the end, so that an interruption leaves no gap
        part.unlink()
    if parts:
        os.truncate(parts[last], offset - before)
    return last, before


class JsonlFiles(Sink):
    """Writes both files. Every record is flushed, so other programs can follow; `offsets` also syncs."""

    def __init__(
        self,
        folder: Path,
        metrics_offset: int | None = None,
        episodes_offset: int | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        metrics, episodes = folder / METRICS_FILE, folder / EPISODES_FILE
        # Check both before truncating either: an error leaves the folder unchanged.
        require_size(metrics, metrics_offset or 0)
        require_size(episodes, episodes_offset or 0)
        # The metrics of a step take a few kilobytes, so they stay in one file.
        self._metrics = PartWriter(metrics, metrics_offset or 0, part_bytes=sys.maxsize)
        self._episodes = PartWriter(episodes, episodes_offset or 0, part_bytes)

    def step(self, index: int, metrics: Metrics, sample: EpisodeView | None, episodes: EpisodeRecords) -> None:
        for episode in episodes:
            if any(has_images(message.get("content")) for message in episode.get("messages", ())):
                episode = {**episode, "messages": self._with_saved_images(episode["messages"])}
            self._episodes.write(_line(episode))
        self._write_metrics("step", index, metrics)

    def _with_saved_images(self, messages: Messages) -> list[Mapping[str, Any]]:
        """The messages with their images as files of the run folder, each written once."""
        return [
            {**message, "content": [self._saved(part) for part in message["content"]]}
            if has_images(message.get("content"))
            else message
            for message in messages
        ]

    def _saved(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        if not is_image(part):
            return part
        image = load(part["image"])
        path = self._folder / IMAGES / f"{image.digest}{suffix_of(image.data)}"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, image.data)
        return {"type": "image", "image": f"{IMAGES}/{path.name}"}

    def evaluation(self, step: int, metrics: Metrics, sample: EpisodeView | None) -> None:
        self._write_metrics("eval", step, metrics)

    def offsets(self) -> tuple[int, int]:
        """Synced sizes of metrics.jsonl and of all parts of episodes.jsonl."""
        return self._metrics.synced(), self._episodes.synced()

    def close(self, status: str) -> None:
        self._metrics.close()
        self._episodes.close()

    def _write_metrics(self, kind: str, step: int, metrics: Metrics) -> None:
        self._metrics.write(_line({"kind": kind, "step": step, "metrics": dict(sorted(metrics.items()))}))


# -- Lines -------------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file. An incomplete last line, which may still be being written, is skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not JSON ({error})") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}, line {number}: {error}") from error
            yield record


def read_record(line: bytes) -> tuple[str, int, dict[str, float | None]]:
    """Parse a line of metrics.jsonl: its kind (step or eval), step and metrics. Raises ValueError."""
    try:
        record = json.loads(line)
        kind, step, metrics = record["kind"], record["step"], record["metrics"]
        if kind not in ("step", "eval") or type(step) is not int or abs(step) > MAX_STEP:
            raise ValueError(f"invalid kind {kind!r:.20} or step {step!r:.20}")
        values = {name: None if value is None else float(value) for name, value in metrics.items()}
        "".join(values).encode()
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a record of metrics: {type(error).__name__}: {error!s:.80}") from None
    return kind, step, values


def finite(value: Any) -> Any:
    """The same value with None for every NaN and infinity, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _line(record: Mapping[str, Any]) -> bytes:
    # Data sets have answers of any type (dates, decimals): types unknown to JSON are written as text.
    return hide_known(json.dumps(finite(record), allow_nan=False, default=str)).encode("ascii") + b"\n"


# -- Episodes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenRow:
    """A token row with the learner's values at each response token (no padding)."""

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
    """A line of episodes.jsonl. `group` and `attempt` count from 0 within the step and the group."""
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
        **_turns(episode),
        "rows": [_row(row, decode) for row in tokens],
    }


def _turns(episode: Episode) -> dict[str, Any]:
    """Reward, state and role of each turn, if any turn has one."""
    turns = [{"reward": turn.reward, "state": turn.state, "role": turn.role} for turn in episode.turns]
    return {"turns": turns} if any(value is not None for turn in turns for value in turn.values()) else {}


def _row(row: TokenRow, decode: Decode) -> dict[str, Any]:
    sample = row.sample
    return {
        "prompt_ids": list(sample.prompt_ids),
        "response_ids": list(sample.response_ids),
        "mask": [int(sampled) for sampled in sample.mask],
        # Each token is decoded alone, so part of a UTF-8 character becomes U+FFFD.
        "text": [decode([token]) for token in sample.response_ids],
        "prompt_text": decode(list(sample.prompt_ids)),
        "logprobs": list(sample.logprobs),
        "advantage": list(row.advantage),
        "ratio": list(row.ratio),
        "entropy": list(row.entropy),
        "versions": list(sample.versions),
    }


def read_episodes(path: Path) -> Iterator[dict[str, Any]]:
    """The episodes in all parts, in order; `path` is the first part. Non-finite numbers are None."""
    for part in parts_of(path) or [path]:  # opening a missing file raises the right error
        for record in read_jsonl(part):
            if record.get("schema") != SCHEMA:
                raise InputError(
                    f"{part}: episode schema {record.get('schema')}, but this version of covey reads {SCHEMA}"
                )
            yield record

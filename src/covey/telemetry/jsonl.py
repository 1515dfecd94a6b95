"""metrics.jsonl and episodes.jsonl: the record that is always kept, and that everything else can be drawn from.

A resumed run cuts both files back to where its checkpoint left them, so that they end without gaps or repeats; half a
line that a killed process left goes with the rest. Episodes grow large: their file goes on in further parts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from covey.errors import InputError
from covey.redact import hide_known
from covey.telemetry.base import EpisodeView, Sink
from covey.telemetry.parts import PART_BYTES, PartWriter, require_size

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

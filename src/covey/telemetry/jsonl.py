"""metrics.jsonl and episodes.jsonl: the record that is always kept, and that everything else can be drawn from.

A resumed run cuts both files back to where its checkpoint left them, so that they end without gaps or repeats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from covey.errors import InputError
from covey.telemetry.base import EpisodeView, Sink

METRICS_FILE = "metrics.jsonl"
EPISODES_FILE = "episodes.jsonl"


class JsonlFiles(Sink):
    """Both files of a run. Each record is flushed, so that other programs can follow; `offsets` also syncs."""

    def __init__(self, folder: Path, metrics_offset: int | None = None, episodes_offset: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Both are checked before either is cut: a refusal leaves the folder as it was.
        _check_offset(folder / METRICS_FILE, metrics_offset)
        _check_offset(folder / EPISODES_FILE, episodes_offset)
        self._metrics = _open_at(folder / METRICS_FILE, metrics_offset)
        self._episodes = _open_at(folder / EPISODES_FILE, episodes_offset)

    def step(
        self,
        index: int,
        metrics: Mapping[str, float],
        sample: EpisodeView | None,
        episodes: Sequence[Mapping[str, Any]],
    ) -> None:
        for episode in episodes:
            _write(self._episodes, episode)
        self._write_metrics("step", index, metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float], sample: EpisodeView | None) -> None:
        self._write_metrics("eval", step, metrics)

    def offsets(self) -> tuple[int, int]:
        """Sizes of the two files, once they are safely on the disk."""
        for file in (self._metrics, self._episodes):
            file.flush()
            os.fsync(file.fileno())
        return self._metrics.tell(), self._episodes.tell()

    def close(self, status: str) -> None:
        self._metrics.close()
        self._episodes.close()

    def _write_metrics(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        _write(self._metrics, {"kind": kind, "step": step, "metrics": dict(sorted(metrics.items()))})


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file. A last line without its line break is still being written (or never will be): left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}, line {number}: not JSON ({error})") from error


def finite(value: Any) -> Any:
    """The same value with None for every NaN and infinity, which JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _write(file: BinaryIO, record: Mapping[str, Any]) -> None:
    # Data sets bring answers of any type (dates, decimals): what JSON does not know is written as text.
    file.write(json.dumps(finite(record), allow_nan=False, default=str).encode("ascii") + b"\n")
    file.flush()


def _check_offset(path: Path, offset: int | None) -> None:
    size = path.stat().st_size if path.exists() else 0
    if offset is not None and size < offset:
        raise InputError(
            f"{path}: {size} bytes, but the checkpoint was written when it had {offset}\n"
            "  the file was cut or replaced since; start a new run with resume=disable"
        )


def _open_at(path: Path, offset: int | None) -> BinaryIO:
    file = path.open("ab")
    file.truncate(offset or 0)
    file.seek(0, os.SEEK_END)
    return file

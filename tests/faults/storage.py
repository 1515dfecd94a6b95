"""Shared by the tests of storage and non-finite values: a minimal training, and a tiny disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.telemetry.key_metrics import is_machine_dependent

SETTINGS = (
    *("data.train_files=tasks.jsonl", "reward=exact", "algorithm=grpo", "data.train_batch_size=1"),
    *("rollout.group_size=2", "rollout.max_tokens=3", "loop.total_steps=4", "loop.save_every=1", "loop.keep_last=1"),
    *("loop.threads=1", "eval.before=false", "eval.after=false", "logging.to=[]", "learner.lr=1e-3"),
    "learner.entropy_coef=0.01",  # a gradient even if no answer is right
)


def prepare(folder: Path) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    rows = [{"question": f"say {i}", "answer": str(i)} for i in range(4)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def train(folder: Path, model: Path, *settings: str, command: str = "train") -> int:
    """The exit code of `covey train` in a folder, run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return main([command, f"model={model}", *SETTINGS, *settings])


def the_run(folder: Path) -> Path:
    (found,) = folder.glob("outputs/*/*")
    return found


def outcome(run: Path, step: int = 4) -> dict[str, Any]:
    """The results of a run: hashes of its last weights and optimiser state, its records without timings."""
    last = run / "checkpoints" / f"step-{step:06d}"
    names = ("model/model.safetensors", "optimizer.safetensors")
    found: dict[str, Any] = {name: hashlib.sha256((last / name).read_bytes()).hexdigest() for name in names}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        timed = [n for n in record["metrics"] if is_machine_dependent(n)]
        for name in timed:
            del record["metrics"][name]
    return found | {"records": records, "episodes": (run / "episodes.jsonl").read_text()}


class SmallDisk:
    """A file system in memory of a given size."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, kilobytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(self.path)], check=True)

    def read_only(self, on: bool) -> None:
        subprocess.run(["mount", "-o", f"remount,{'ro' if on else 'rw'}", str(self.path)], check=True)

    def fill(self) -> None:
        """Fill the disk completely."""
        with (self.path / "ballast").open("ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"x" * 4096)

    def free(self) -> None:
        (self.path / "ballast").unlink()


@contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[SmallDisk]:
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here: that needs root, and a kernel that lets it")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)

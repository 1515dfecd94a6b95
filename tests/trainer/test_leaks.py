"""Trainers that come and go in one process leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest

import covey
from covey.storage import is_locked
from tests.trainer.conftest import ROWS, SMALL, vowels

SCRIPT = """
import covey

def vowels(final_answer):
    return sum(letter in "aeiou" for letter in final_answer) / 5

rows = [{"question": f"say {i}", "answer": "a"} for i in range(4)]
trainer = covey.Trainer("MODEL", rows, vowels, MODE, **SMALL)
trainer.step()
"""


def counts() -> dict[str, int]:
    gc.collect()
    return {
        "threads": sum(thread.name.startswith("covey") for thread in threading.enumerate()),
        "files": len(os.listdir("/proc/self/fd")),
        "children": len(psutil.Process().children(recursive=True)),
        "frozen": gc.get_freeze_count(),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
@pytest.mark.usefixtures("nothing_is_frozen")
@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("close", marks=pytest.mark.slow),
        pytest.param("forget", marks=pytest.mark.slow),
        "mode=async",
        pytest.param("failed", marks=pytest.mark.slow),
    ],
)
def test_repeated_trainers_leave_nothing(tiny_model_folder: Path, ending: str) -> None:
    def one() -> weakref.ref[Any]:
        mode = {"mode": "async"} if ending == "mode=async" else {}
        trainer = covey.Trainer(str(tiny_model_folder), ROWS, vowels, **SMALL, **mode)
        trainer.step()
        path, model = trainer.path, weakref.ref(trainer.model)
        if ending == "failed":
            trainer.callbacks.append(lambda trainer, step: 1 / 0)
            with pytest.raises(RuntimeError):
                trainer.step()
        elif ending != "forget":
            trainer.close()
            assert trainer.model is not None  # still there for saving
        del trainer
        gc.collect()
        assert not is_locked(path)
        expected = "failed" if ending == "failed" else "interrupted"
        assert json.loads((path / "run.json").read_text())["status"] == expected
        return model

    one()  # what is loaded once stays
    before = counts()
    models = [one() for _ in range(3)]
    assert counts() == before
    assert [model() for model in models] == [None] * 3


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_the_end_of_the_process_closes_the_run(tiny_model_folder: Path, mode: str) -> None:
    text = SCRIPT.replace("MODEL", str(tiny_model_folder)).replace("MODE", f"mode={mode!r}")
    Path("script.py").write_text(text.replace("SMALL", repr(SMALL)))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (info,) = Path("outputs").glob("*/*/run.json")
    assert json.loads(info.read_text())["status"] == "interrupted"
    assert (info.parent / "summary.md").is_file()

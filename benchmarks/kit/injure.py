"""Fault injection: applied inside a run's process before the command starts; Covey itself has no hooks.

This file wraps functions, the *places*. Each call of a place has a moment before it, one after it, and if it writes
something, one in the middle of the write. All moments are counted together, so the n-th is the same in every run of the
same command, and a sweep over n covers all of them. Alternatively, Python's audit events identify the calls that change
the file system: creating a folder; opening a file for writing; renaming, removing or truncating it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

# Every stage of a step and every write of a run. "write" ones can be torn in the middle.
PLACES = {
    "rollout": "covey.rollout.collector:TrainingSource.next",
    "rollout-ahead": "covey.rollout.asynchronous:BackgroundSource.next",
    "reward": "covey.rewards.rewardset:RewardSet.__call__",
    "annotate": "covey.learner.learner:Learner.annotate",
    "update": "covey.learner.learner:Learner.update",
    "publish": "covey.training.step:publish",
    "publish-first": "covey.training.run:publish",
    "evaluate": "covey.training.evaluate:Evaluator.run",
    "sft-evaluate": "covey.training.sft:likelihood",
    "record": "covey.telemetry.telemetry:Telemetry.record",
    "record-evaluation": "covey.telemetry.telemetry:Telemetry.evaluation",
    "line": "covey.telemetry.jsonl:PartWriter.write",
    "offsets": "covey.telemetry.telemetry:Telemetry.offsets",
    "cut": "covey.telemetry.jsonl:_cut",
    "checkpoint": "covey.training.checkpoint:CheckpointStore.save",
    "weights": "covey.learner.learner:Learner.save",
    "tensors": "covey.learner.saving:save_tensors",
    "fsync": "os:fsync",
    "rename": "pathlib:Path.rename",
    "replace": "os:replace",
    "remove-tree": "shutil:rmtree",
    "delete-old": "covey.training.checkpoint:CheckpointStore.delete_old",
    "newest": "covey.training.checkpoint:CheckpointStore.latest",
    "text": "pathlib:Path.write_text",
    "run-files": "covey.app.build:write_run_files",
    "sft-run-files": "covey.app.sft:write_run_files",
    "info": "covey.training.folder:RunFolder.write_info",
    "close": "covey.telemetry.telemetry:Telemetry.close",
    "status": "covey.training.folder:RunFolder.set_status",
    "release": "covey.training.folder:RunFolder.release",
    "report": "covey.training.run:write_report",
    "sft-report": "covey.training.sft:write_report",
}
TORN = ("line", "text")  # half of the data is written in the middle of the write
EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "open")


@dataclass(frozen=True)
class Plan:
    at: int = 0  # number of the moment at which the fault happens, from 1; 0: never
    signal: int = signal.SIGKILL
    again: int = 0  # repeat the signal after this number of moments; 0: once
    files: bool = False  # count calls that change the file system, not moments at places
    places: list[str] = field(default_factory=list)  # count only these; empty: all
    log: str = ""  # a file for the name of every moment, one a line
    tickets: str = ""  # a file for the tickets that each step took, where sampling is ahead
    clock: float = 0.0  # seconds that the calendar's clock is ahead; it may be behind
    drift: float = 0.0  # seconds that it jumps back each time it is read
    workers: int = 0  # processes for rewards and environments; 0: as many as usual
    pause: float = 0.0  # seconds that the process waits at that moment instead of getting a signal


class _Moments:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.count, self.process = plan, 0, os.getpid()
        self.file = os.open(plan.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC) if plan.log else -1

    def passed(self, name: str) -> None:
        if os.getpid() != self.process:  # a fork of the run's
            return
        self.count += 1
        if self.file >= 0:
            os.write(self.file, f"{name}\n".encode())
        if self.count == self.plan.at and self.plan.pause:
            time.sleep(self.plan.pause)
        elif self.count in (self.plan.at, self.plan.at + self.plan.again) and self.plan.at:
            os.kill(os.getpid(), self.plan.signal)


def injure(plan: Plan) -> None:
    moments = _Moments(plan)
    if plan.files:
        sys.addaudithook(lambda event, given: _audited(moments, event, given))
        _wrap(moments, "fsync", PLACES["fsync"], tearing=False)
    elif plan.at or plan.log:
        for name in plan.places or PLACES:
            _wrap(moments, name, PLACES[name], tearing=name in TORN)
    if plan.tickets:
        _record_tickets(plan.tickets)
    if plan.workers:
        agents = importlib.import_module("covey.app.parts")
        agents.WorkerPool = partial(agents.WorkerPool, max_workers=plan.workers)  # type: ignore[attr-defined]
    if plan.clock or plan.drift:
        _turn_the_clock(plan)


def _audited(moments: _Moments, event: str, given: tuple[Any, ...]) -> None:
    if event not in EVENTS or (event == "open" and not _writes(given)):
        return
    moments.passed(f"{event} {given[0]}")


def _writes(given: tuple[Any, ...]) -> bool:
    path, mode, flags = given
    changes = any(letter in mode for letter in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return changes and not str(path).startswith(("/dev/", "/proc/"))


def _wrap(moments: _Moments, name: str, target: str, *, tearing: bool) -> None:
    module, _, path = target.partition(":")
    holder: Any = importlib.import_module(module)
    *owners, last = path.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    call = getattr(holder, last)
    if inspect.iscoroutinefunction(call):

        @wraps(call)
        async def slowly(*given: Any, **named: Any) -> Any:
            moments.passed(f"before {name}")
            found = await call(*given, **named)
            moments.passed(f"after {name}")
            return found

        setattr(holder, last, slowly)
        return

    @wraps(call)
    def wrapped(*given: Any, **named: Any) -> Any:
        moments.passed(f"before {name}")
        found = _torn(moments, name, call, *given, **named) if tearing else call(*given, **named)
        moments.passed(f"after {name}")
        return found

    setattr(holder, last, wrapped)


def _torn(moments: _Moments, name: str, call: Callable[..., Any], whom: Any, data: Any, **named: Any) -> Any:
    """A write that reaches the moment with half of its data on disk."""
    if name == "text":
        call(whom, data[: len(data) // 2], **named)
        moments.passed(f"during {name} {whom.name}")
        return call(whom, data, **named)
    call(whom, data[: len(data) // 2])
    moments.passed(f"during {name}")
    return call(whom, data[len(data) // 2 :])


def _record_tickets(path: str) -> None:
    from covey.rollout.asynchronous import Window

    take = Window.take

    def taking(self: Window) -> Any:
        found = take(self)
        if found is not None:
            with Path(path).open("a") as file:
                file.write(f"{self.step} {' '.join(str(ticket.number) for ticket in found)}\n")
        return found

    Window.take = taking  # type: ignore[method-assign]


def _turn_the_clock(plan: Plan) -> None:
    """Only the calendar's clock can be set; that of durations (time.monotonic) never goes back."""
    real, read, moved = time.time, datetime.now, [plan.clock]

    def ahead() -> float:
        moved[0] -= plan.drift
        return moved[0]

    class Turned(datetime):
        @classmethod
        def now(cls, zone: Any = None) -> Any:
            return read(zone) + timedelta(seconds=ahead())

    time.time = lambda: real() + ahead()
    for module in ("covey.training.folder", "covey.app.run_files", "covey.app.sweep"):
        importlib.import_module(module).datetime = Turned  # type: ignore[attr-defined]

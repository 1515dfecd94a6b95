"""Runs a prepared run to its end and reports it: what covey train, covey.train and covey.trl share."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.errors import InputError, RunFailed

if TYPE_CHECKING:
    from covey.app.build import Note
    from covey.app.prepare import Prepared
    from covey.app.sft import PreparedSft
    from covey.training.run import Run
    from covey.training.sft import SftRun


def exit_code(run: Run | SftRun, unfinished: int | None = None) -> int:
    """Of a run that ended by itself, by its minutes or by SIGTERM; Ctrl-C's is 130."""
    from covey.training.interrupts import TERMINATED

    if is_finished(run.path):
        return 0
    return unfinished if unfinished is not None else TERMINATED if run.terminated else 0


def run_to_end(prepared: Prepared, drive: Callable[[Run], None] | None = None) -> Run:
    """Build a run, train it to its end and report. `drive` makes the steps; by default here, on an event loop of its
    own."""

    def to_its_end(run: Run) -> None:
        with telling_how_to_go_on(run.path, prepared.config.resume):
            complete(run.train())

    run = _trained(prepared, drive or to_its_end, note=print_note)
    report_end(run)
    return run


def report_end(run: Run) -> None:
    tell_of_the_limit(run, run.config.resume)
    if "console" in run.config.logging.to:
        from covey.telemetry import print_summary

        print_summary(run.path)


def print_note(text: str) -> None:
    print(text, file=sys.stderr)


def _trained(prepared: Prepared, drive: Callable[[Run], None], note: Note) -> Run:
    """A run that has ended. In a cluster, one that lost a learner begins again from its last checkpoint."""
    from covey.app.build import build

    if prepared.config.cluster.name != "ray":
        run = build(prepared, note=note)
        drive(run)
        return run
    return _trained_in_cluster(prepared, drive, note)


def _trained_in_cluster(prepared: Prepared, to_its_end: Callable[[Run], None], note: Note) -> Run:
    from covey.app.build import build, continuing
    from covey.cluster.learner import with_restarts
    from covey.cluster.start import opening

    last: Path | None = None  # the folder of the attempt before

    def make(folder: Path | None) -> Run:
        nonlocal last
        last = folder
        if folder is not None:
            note(f"the run goes on {_where_from(folder)}")
        note(opening(prepared.config.cluster))
        if folder is None:
            return build(prepared, note=note)
        with telling_how_to_go_on(folder, prepared.config.resume):
            return build(continuing(prepared, folder), note=note)

    try:
        run: Run = with_restarts(make, to_its_end, limit=prepared.config.cluster.max_restarts, note=note)
        return run
    except BaseException as error:
        if last is not None:
            _end_if_running(last, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise


def _where_from(path: Path) -> str:
    from covey.training.checkpoint import step_folders, step_of

    if not (steps := step_folders(path / "checkpoints")):
        return "from the start: there is no checkpoint yet (loop.save_every)"
    return f"from its last checkpoint, after step {step_of(steps[-1])}"


def _end_if_running(folder: Path, status: str) -> None:
    """A run that is about to be started again says `running`. If it could not be built, that is no longer true."""
    from covey.storage import StorageFailed
    from covey.training.folder import open_folder

    with suppress(InputError, StorageFailed):  # the error that ended the run must not be hidden by this one
        found = open_folder(folder)
        try:
            if found.info()["status"] == "running":
                found.set_status(status)
        finally:
            found.release()


@contextmanager
def telling_how_to_go_on(path: Path, resume: str = "auto", *, interrupted: bool = True) -> Iterator[None]:
    """Say, of a run that failed or (`interrupted`) was interrupted, whether it can be continued and from where."""
    from covey.storage import StorageFailed, describe_failure, storage_errno

    try:
        yield
    except KeyboardInterrupt:
        if interrupted:
            print(f"\n{how_to_go_on(path, resume)}", file=sys.stderr)
        raise
    except RunFailed as error:
        error.add_note(f"  {how_to_go_on(path, resume)}")
        raise
    except Exception as error:
        if (number := storage_errno(error)) is None:
            raise
        failed = StorageFailed(describe_failure(path, number))
        failed.add_note(f"  {how_to_go_on(path, resume)}")
        raise failed from error


def how_to_go_on(path: Path, resume: str = "auto") -> str:
    from covey.training.checkpoint import step_folders, step_of

    if is_finished(path):
        return f"all steps are made, and all is saved: {path}"
    if not (steps := step_folders(path / "checkpoints")):
        return "there is no checkpoint to go on from (loop.save_every writes some)"
    command = f"the same command with resume={path}" if resume == "disable" else "the same command"
    return f"{command} goes on from the last checkpoint, after step {step_of(steps[-1])}"


def tell_of_the_limit(run: Run | SftRun, resume: str = "auto") -> None:
    """Of a run that loop.max_minutes or SIGTERM has ended."""
    if not is_finished(run.path):
        what = "SIGTERM came" if run.terminated else "the time is over (loop.max_minutes)"
        print(f"{what}; all is saved, and {how_to_go_on(run.path, resume)}", file=sys.stderr)


def is_finished(path: Path) -> bool:
    """What run.json says. Asked while something else is being told of, it must not be in the way."""
    try:
        return bool(json.loads((path / "run.json").read_text())["status"] == "finished")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def complete(training: Coroutine[Any, Any, Any]) -> None:
    """Run to the end, also where an event loop runs already, as in a notebook."""
    from covey.training.interrupts import restore_ctrl_c

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with restore_ctrl_c():
            asyncio.run(training)
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, training).result()


def run_sft_to_end(prepared: PreparedSft) -> SftRun:
    from covey.app.sft import build_sft
    from covey.telemetry import print_summary
    from covey.training.interrupts import restore_ctrl_c

    run = build_sft(prepared, note=lambda text: print(text, file=sys.stderr))
    with telling_how_to_go_on(run.path, prepared.config.resume), restore_ctrl_c():
        run.train()
    tell_of_the_limit(run, prepared.config.resume)
    if "console" in prepared.config.logging.to:
        print_summary(run.path)
    return run

"""Trains a prepared run to its end and reports the result: covey train, covey sft, covey.train and covey.trl."""

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
    """The exit code of a run that finished, reached loop.max_minutes or got SIGTERM. `unfinished` replaces the last
    two. Ctrl-C exits with 130."""
    from covey.training.interrupts import TERMINATED

    if is_finished(run.path):
        return 0
    return unfinished if unfinished is not None else TERMINATED if run.terminated else 0


def run_to_end(prepared: Prepared, drive: Callable[[Run], None] | None = None) -> Run:
    """Build a run, train it to its end and report. `drive` runs the steps; by default on a new event loop."""
    from covey.app.build import build

    def run_steps(run: Run) -> None:
        with resume_hint_on_failure(run.path, prepared.config.resume):
            run_coroutine(run.train())

    if prepared.config.cluster.name == "ray":
        run = _run_with_restarts(prepared, drive or run_steps, print_note)
    else:
        run = build(prepared, note=print_note)
        (drive or run_steps)(run)
    report_end(run)
    return run


def report_end(run: Run | SftRun) -> None:
    report_early_stop(run, run.config.resume)
    if "console" in run.config.logging.to:
        from covey.telemetry import print_summary

        print_summary(run.path)


def print_note(text: str) -> None:
    print(text, file=sys.stderr)


def _run_with_restarts(prepared: Prepared, run_steps: Callable[[Run], None], note: Note) -> Run:
    """On a cluster, a run that lost a learner restarts from its last checkpoint."""
    from covey.app.build import build, prepare_restart
    from covey.cluster.learner import with_restarts
    from covey.cluster.start import opening

    last: Path | None = None  # the folder of the previous attempt

    def make(folder: Path | None) -> Run:
        nonlocal last
        last = folder
        if folder is not None:
            note(f"the run restarts {_restart_point(folder)}")
        note(opening(prepared.config.cluster))
        if folder is None:
            return build(prepared, note=note)
        with resume_hint_on_failure(folder, prepared.config.resume):
            return build(prepare_restart(prepared, folder), note=note)

    try:
        run: Run = with_restarts(make, run_steps, limit=prepared.config.cluster.max_restarts, note=note)
        return run
    except BaseException as error:
        if last is not None:
            _set_final_status(last, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise


def _restart_point(path: Path) -> str:
    from covey.training.checkpoint import step_folders, step_of

    if not (steps := step_folders(path / "checkpoints")):
        return "from the beginning: there is no checkpoint yet (loop.save_every)"
    return f"from its last checkpoint, after step {step_of(steps[-1])}"


def _set_final_status(folder: Path, status: str) -> None:
    """Replace the status `running` of a run that could not be restarted."""
    from covey.storage import StorageFailed
    from covey.training.folder import open_folder

    with suppress(InputError, StorageFailed):  # must not hide the error that ended the run
        opened = open_folder(folder)
        try:
            if opened.info()["status"] == "running":
                opened.set_status(status)
        finally:
            opened.release()


@contextmanager
def resume_hint_on_failure(path: Path, resume: str = "auto", *, interrupted: bool = True) -> Iterator[None]:
    """Add a resume hint to the errors of a run. `interrupted`: also print it after Ctrl-C."""
    from covey.storage import StorageFailed, describe_failure, storage_errno

    try:
        yield
    except KeyboardInterrupt:
        if interrupted:
            print(f"\n{resume_hint(path, resume)}", file=sys.stderr)
        raise
    except RunFailed as error:
        error.add_note(f"  {resume_hint(path, resume)}")
        raise
    except Exception as error:
        if (number := storage_errno(error)) is None:
            raise
        failed = StorageFailed(describe_failure(path, number))
        failed.add_note(f"  {resume_hint(path, resume)}")
        raise failed from error


def resume_hint(path: Path, resume: str = "auto") -> str:
    from covey.training.checkpoint import step_folders, step_of

    if is_finished(path):
        return f"all steps are done and saved: {path}"
    if not (steps := step_folders(path / "checkpoints")):
        return "there is no checkpoint to continue from (loop.save_every writes some)"
    command = f"the same command with resume={path}" if resume == "disable" else "the same command"
    return f"{command} continues from the last checkpoint, after step {step_of(steps[-1])}"


def report_early_stop(run: Run | SftRun, resume: str = "auto") -> None:
    """Print why a run stopped before its last step (loop.max_minutes or SIGTERM), and how to continue it."""
    if not is_finished(run.path):
        reason = "stopped by SIGTERM" if run.terminated else "time limit reached (loop.max_minutes)"
        print(f"{reason}; everything is saved, and {resume_hint(run.path, resume)}", file=sys.stderr)


def is_finished(path: Path) -> bool:
    """The status in run.json. Never raises: it is read while other errors are reported."""
    try:
        return bool(json.loads((path / "run.json").read_text())["status"] == "finished")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def run_coroutine(training: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine to its end, also inside a running event loop, as in a notebook."""
    from covey.training.interrupts import restore_ctrl_c

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with restore_ctrl_c():
            asyncio.run(training)
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, training).result()


def run_sft(prepared: PreparedSft) -> SftRun:
    from covey.app.sft import build_sft
    from covey.training.interrupts import restore_ctrl_c

    run = build_sft(prepared, note=print_note)
    with resume_hint_on_failure(run.path, prepared.config.resume), restore_ctrl_c():
        run.train()
    report_end(run)
    return run

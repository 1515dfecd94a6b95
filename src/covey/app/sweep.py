"""Sweeps: every combination of settings as a run of its own, in this process or as jobs through submitit.

submitit submits to Slurm if it is installed; otherwise jobs are processes on this machine.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from covey.app.compose import CommandLine, compose_command
from covey.config import Composed, WrongValues
from covey.errors import InputError, RunFailed, unknown
from covey.imports import require
from covey.redact import hide_words

LAUNCHERS = ("submitit",)


def compose_all(args: CommandLine, combinations: list[list[str]]) -> list[Composed]:
    """The configuration of every run of a sweep. Wrong values of all runs are reported together."""
    composed: list[Composed] = []
    wrong: list[str] = []
    for settings in combinations:
        try:
            composed.append(compose_command(args, settings=settings, training=True))
        except WrongValues as error:
            wrong += error.problems
    if wrong:
        raise WrongValues(wrong)
    return composed


def run_here(jobs: Sequence[Composed], before_each: Callable[[int], None]) -> bool:
    """Train one run after the other, in multirun/DATE/TIME/NUMBER. False if SIGTERM ended the sweep.

    All are checked before the first one starts.
    """
    from covey.app.prepare import prepare
    from covey.app.train import run_to_end

    prepared = [prepare(job) for job in jobs]
    base = new_base(Path("multirun"))
    for number, job in enumerate(prepared):
        before_each(number)
        if run_to_end(dataclasses.replace(job, folder=base / str(number))).terminated:
            return False
        gc.collect()  # frees the models of the last run
    return True


def new_base(folder: Path) -> Path:
    """A new folder/DATE/TIME. A number is appended if it exists: two sweeps may start in the same second."""
    base = folder / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    for attempt in itertools.count():
        path = base if attempt == 0 else base.with_name(f"{base.name}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise AssertionError("not reached")


# -- Jobs through submitit ---------------------------------------------------------------------------------------------


def submit(
    launcher: str, jobs: Sequence[list[str]], folder: Path, source: dict[str, str | bool], options: dict[str, Any]
) -> list[str]:
    """Submit a job for each list of settings, in folder/NUMBER, and return their ids. `source` is the flag --config or
    --config-name. Waits for jobs on this machine, not for queued ones."""
    if launcher not in LAUNCHERS:
        raise unknown("launcher", launcher, LAUNCHERS)
    submitit = require("submitit", "slurm", "--launcher submitit needs the package submitit")
    for settings in jobs:
        refuse_secrets(settings, "the files of its jobs")
    folder = folder.absolute()
    executor = submitit.AutoExecutor(folder=folder / "jobs", cluster=options.pop("cluster", None))
    try:
        executor.update_parameters(**{"name": "covey", "timeout_min": 60} | options)
    except NameError as error:  # submitit's error about an unknown parameter
        raise InputError(f"--launcher-options: {error}") from error
    with executor.batch():
        started = [
            executor.submit(train_one, source, settings, str(folder / str(number)))
            for number, settings in enumerate(jobs)
        ]
    if executor.cluster == "local":
        failed = [str(number) for number, job in enumerate(started) if job.exception() is not None]
        if failed:
            raise RunFailed(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}\n  logs: {folder / 'jobs'}")
    return [str(job.job_id) for job in started]


def train_one(source: dict[str, str | bool], settings: list[str], place: str) -> str:
    """Train one run in the process of its job."""
    from covey.app.prepare import prepare
    from covey.app.train import run_to_end

    composed = compose_command(CommandLine(settings=settings, flags=source), training=True)
    return str(run_to_end(prepare(composed, folder=Path(place))).path)


def read_options(text: str | None) -> dict[str, Any]:
    """`timeout_min=240,slurm_partition=gpu` as a dict; whole numbers become ints."""
    options: dict[str, Any] = {}
    for part in filter(None, (text or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"--launcher-options {part}: write key=value,key=value")
        options[key] = int(value) if value.isdecimal() else value
    return options


def refuse_secrets(settings: Sequence[str], place: str) -> None:
    """Settings of a job are stored in files until it starts, so they must not hold secrets."""
    for word, shown in zip(settings, hide_words(settings), strict=True):
        if word != shown:
            raise InputError(
                f"{shown}: a secret, which would be written into {place}\n"
                "  keep it in a variable of the environment or in .env, and name that where a setting allows it (*_env)"
            )

"""Runs of a sweep as jobs of their own, through submitit: on Slurm where there is one, else as processes here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.errors import Absent, InputError, RunFailed, unknown
from covey.install import install_extra
from covey.redact import hide_words

LAUNCHERS = ("submitit",)


def require_submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise Absent(f"--launcher submitit needs the package submitit\n  fix: {install_extra('slurm')}") from error
    return submitit


def refuse_secrets(settings: Sequence[str], place: str) -> None:
    """What a job is told lies in files until its turn comes."""
    for word, shown in zip(settings, hide_words(settings), strict=True):
        if word != shown:
            raise InputError(
                f"{shown}: a secret, which would be written into {place}\n"
                "  keep it in a variable of the environment or in .env, and name that where a setting allows it (*_env)"
            )


def read_options(text: str | None) -> dict[str, Any]:
    """`timeout_min=240,gpus_per_node=1,slurm_partition=gpu`: numbers where they are some."""
    found: dict[str, Any] = {}
    for part in filter(None, (text or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"--launcher-options {part}: write key=value,key=value")
        found[key] = int(value) if value.isdecimal() else value
    return found


def submit(
    launcher: str, jobs: Sequence[list[str]], folder: Path, source: dict[str, str | bool], options: dict[str, Any]
) -> list[str]:
    """A job for each list of settings, in folder/NUMBER; their ids. `source`: --config or --config-name. Jobs on this
    machine are waited for, those in a queue are not."""
    if launcher not in LAUNCHERS:
        raise unknown("launcher", launcher, LAUNCHERS)
    submitit = require_submitit()
    for settings in jobs:
        refuse_secrets(settings, "the files of its jobs")
    folder = folder.absolute()
    executor = submitit.AutoExecutor(folder=folder / "jobs", cluster=options.pop("cluster", None))
    try:
        executor.update_parameters(**{"name": "covey", "timeout_min": 60} | options)
    except NameError as error:  # what submitit calls a parameter that it does not know
        raise InputError(f"--launcher-options: {error}") from error
    places = [str(folder / str(number)) for number in range(len(jobs))]
    with executor.batch():
        started = [
            executor.submit(train_one, source, settings, place) for settings, place in zip(jobs, places, strict=True)
        ]
    if executor.cluster == "local":
        _wait(started, folder)
    return [str(job.job_id) for job in started]


def _wait(jobs: Sequence[Any], folder: Path) -> None:
    failed = {str(number): error for number, job in enumerate(jobs) if (error := job.exception()) is not None}
    if failed:
        raise RunFailed(f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}\n  logs: {folder / 'jobs'}")


def train_one(source: dict[str, str | bool], settings: list[str], place: str) -> str:
    """One run, in the process of its job."""
    from covey.cli.prepare import prepare
    from covey.cli.train import run_to_end
    from covey.cli.words import Words, compose_words

    composed = compose_words(Words(settings=settings, flags=source), training=True)
    return str(run_to_end(prepare(composed, folder=Path(place))).path)

"""covey slurm: a job script that starts Ray on the nodes of a Slurm job and trains on them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from covey.cli.launch import refuse_secrets
from covey.cli.slurm_script import script
from covey.cli.words import Words, compose_words, parse
from covey.errors import InputError, unknown

USAGE = """\
covey slurm RECIPE --nodes 2 --gpus-per-node 8 [flags] [key=value ...]

  Prints a script for sbatch: a Ray head on the first node, workers on the others, and covey train with cluster=ray. The
  run stops with a checkpoint before the time is over, and the job queues again to go on.

  RECIPE               a recipe, or a YAML file that all nodes can read
  --nodes 2            machines
  --gpus-per-node 8    0: train on CPUs
  --mode async         sync | async; async: half of the GPUs learn (cluster.learner_devices=... says otherwise)
  --time 04:00:00      of the job, as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS
  --margin 15          minutes before the end at which the run stops; default a tenth of the time, at least 5
  --partition P  --account A  --qos Q  --constraint C  --job-name NAME
  --setup LINE         a line of shell before all else:  --setup 'source .venv/bin/activate'
  --output FILE        write the script there instead of printing it

  covey slurm gvpo_math --nodes 2 --gpus-per-node 8 --time 04:00:00 --output job.sh  &&  sbatch job.sh
"""
PLAIN = ("--partition", "--account", "--qos", "--constraint")
VALUES = (
    *("--nodes", "--gpus-per-node", "--mode", "--time", "--margin", "--job-name", "--setup", "--output"),
    *PLAIN,
)


@dataclass(frozen=True)
class Job:
    """What a script is made of."""

    recipe: str
    settings: tuple[str, ...]
    nodes: int
    gpus: int  # of a node
    mode: str
    seconds: int
    margin: int  # seconds
    name: str
    setup: str
    directives: tuple[tuple[str, str], ...]  # partition, account ...
    made_by: str


def main(argv: list[str]) -> int:
    words = parse(argv, values=VALUES)
    if words.help:
        print(USAGE)
        return 0
    job = read_job(words, argv)
    _check_settings(job)
    refuse_secrets(job.settings, "the job script")
    text = script(
        nodes=job.nodes,
        gpus=job.gpus,
        seconds=job.seconds,
        margin=job.margin,
        name=job.name,
        setup=job.setup,
        directives=job.directives,
        command=command(job),
        made_by=job.made_by,
    )
    if written := words.text("--output"):
        Path(written).expanduser().write_text(text)
    else:
        print(text, end="")
    return 0


def read_job(words: Words, argv: list[str]) -> Job:
    if len(words.places) != 1:
        raise InputError(f"name one recipe\n\n{USAGE.rstrip()}")
    mode = words.text("--mode") or "sync"
    if mode not in ("sync", "async"):
        raise unknown("value of --mode", mode, ("sync", "async"))
    seconds = seconds_of(words.text("--time") or "04:00:00")
    margin = 60 * _whole(words, "--margin", max(5, seconds // 600))
    if margin >= seconds:
        raise InputError(f"--margin {margin // 60}: the job has {seconds // 60} minutes in all\n  give it more --time")
    recipe = words.places[0]
    return Job(
        recipe=recipe,
        settings=tuple(words.settings),
        nodes=_whole(words, "--nodes", 1, least=1),
        gpus=_whole(words, "--gpus-per-node", 8),
        mode=mode,
        seconds=seconds,
        margin=margin,
        name=_plain("--job-name", words.text("--job-name") or f"covey-{Path(recipe).stem}"),
        setup=words.text("--setup") or "",
        directives=tuple((flag[2:], _plain(flag, text)) for flag in PLAIN if (text := words.text(flag)) is not None),
        made_by=shlex.join(["covey", "slurm", *argv]).replace("\n", " "),
    )


def command(job: Job) -> list[str]:
    source = "--config" if job.recipe.endswith((".yaml", ".yml")) else "--config-name"
    return ["covey", "train", source, job.recipe, "--unfinished", "75", *settings(job)]


def settings(job: Job) -> list[str]:
    """What follows from the job unless the user's settings say it, and those."""
    devices = job.nodes * max(1, job.gpus)
    learners = max(1, devices // 2) if job.mode == "async" else devices
    derived = {
        "cluster": "ray",
        "cluster.nodes": str(job.nodes),
        "cluster.learner_devices": str(learners),
        "mode": job.mode,
        "loop.max_minutes": f"{(job.seconds - job.margin) / 60:g}",
    }
    if job.mode == "async" and devices > 1:
        derived["cluster.rollout_devices"] = str(devices - learners)
    given = {word.partition("=")[0].lstrip("+") for word in job.settings}
    aliases = {"cluster": "cluster.name", "mode": "mode.name"}
    kept = [f"{key}={value}" for key, value in derived.items() if not given & {key, aliases.get(key, key)}]
    return [*kept, *job.settings]


def _check_settings(job: Job) -> None:
    """A mistake in the settings is told now, not when the job's turn has come."""
    is_file = job.recipe.endswith((".yaml", ".yml"))
    flags: dict[str, str | bool] = {"--validate-only": True}
    if not is_file:
        flags["--config-name"] = job.recipe
    words = Words(settings=settings(job), flags=flags)
    compose_words(words, config_path=Path(job.recipe).expanduser() if is_file else None)


def seconds_of(text: str) -> int:
    """Slurm's ways to write a time: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise InputError(f"--time {text}: write minutes, HH:MM:SS or D-HH:MM:SS")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(parts) == 3:
        return (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)


def _plain(flag: str, text: str) -> str:
    """Lines of #SBATCH are no shell: what would need quotes is refused."""
    if not re.fullmatch(r"[A-Za-z0-9_.,:@&|+\[\]*-]+", text):
        raise InputError(f"{flag} {text!r}: letters, digits and _.,:@&|+[]*- only")
    return text


def _whole(words: Words, flag: str, default: int, *, least: int = 0) -> int:
    text = words.text(flag)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{flag} wants a whole number from {least} on, got {text}")
    return int(text)

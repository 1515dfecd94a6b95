"""covey slurm: prints a job script that starts Ray on the nodes of a Slurm job and trains on them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from covey.app.compose import CommandLine
from covey.app.slurm import Job, seconds_of
from covey.app.sweep import refuse_secrets
from covey.cli.parse import parse
from covey.errors import InputError, unknown

USAGE = """\
covey slurm RECIPE --nodes 2 --gpus-per-node 8 [flags] [key=value ...]

  Prints a script for sbatch: a Ray head on the first node, workers on the others, and covey train with cluster=ray. The
  run stops with a checkpoint before the time limit, and the job is requeued to continue.

  RECIPE               a recipe, or a YAML file that all nodes can read
  --nodes 2            machines
  --gpus-per-node 8    0: train on CPUs
  --mode async         sync | async; async: half of the GPUs learn, unless `cluster.learner_devices` is set
  --time 04:00:00      of the job, as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS
  --margin 15          minutes before the end at which the run stops; default a tenth of the time, at least 5
  --partition P  --account A  --qos Q  --constraint C  --job-name NAME
  --setup LINE         a line of shell before all else:  --setup 'source .venv/bin/activate'
  --output FILE        write the script there instead of printing it

  covey slurm gvpo_math --nodes 2 --gpus-per-node 8 --time 04:00:00 --output job.sh  &&  sbatch job.sh
"""
DIRECTIVES = ("--partition", "--account", "--qos", "--constraint")
VALUES = (
    *("--nodes", "--gpus-per-node", "--mode", "--time", "--margin", "--job-name", "--setup", "--output"),
    *DIRECTIVES,
)


def main(argv: list[str]) -> int:
    args = parse(argv, values=VALUES)
    job = parse_job(args, argv)
    job.check()
    refuse_secrets(job.settings, "the job script")
    if path := args.value("--output"):
        Path(path).expanduser().write_text(job.script())
    else:
        print(job.script(), end="")
    return 0


def parse_job(args: CommandLine, argv: list[str]) -> Job:
    recipe = args.one("recipe", USAGE)
    mode = args.value("--mode") or "sync"
    if mode not in ("sync", "async"):
        raise unknown("value of --mode", mode, ("sync", "async"))
    seconds = seconds_of(args.value("--time") or "04:00:00")
    margin = 60 * args.integer("--margin", max(5, seconds // 600), least=0)
    if margin >= seconds:
        raise InputError(f"--margin {margin // 60}: the job has {seconds // 60} minutes in all\n  give it more --time")
    directives = ((flag, text) for flag in DIRECTIVES if (text := args.value(flag)) is not None)
    return Job(
        recipe=recipe,
        settings=tuple(args.settings),
        nodes=args.integer("--nodes", 1),
        gpus=args.integer("--gpus-per-node", 8, least=0),
        mode=mode,
        seconds=seconds,
        margin=margin,
        name=_unquoted("--job-name", args.value("--job-name") or f"covey-{Path(recipe).stem}"),
        setup=args.value("--setup") or "",
        directives=tuple((flag[2:], _unquoted(flag, text)) for flag, text in directives),
        made_by=shlex.join(["covey", "slurm", *argv]).replace("\n", " "),
    )


def _unquoted(flag: str, text: str) -> str:
    """#SBATCH lines are not shell, so values that need quotes are refused."""
    if not re.fullmatch(r"[A-Za-z0-9_.,:@&|+\[\]*-]+", text):
        raise InputError(f"{flag} {text!r}: letters, digits and _.,:@&|+[]*- only")
    return text

"""Runs of a sweep as jobs of their own, through submitit: on Slurm where there is one, else as processes here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covey.app.compose import Words, compose_words
from covey.cli.words import parse
from covey.errors import Absent, InputError, RunFailed, unknown
from covey.imports import install_extra
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
    from covey.app.compose import Words, compose_words
    from covey.app.prepare import prepare
    from covey.app.train import run_to_end

    composed = compose_words(Words(settings=settings, flags=source), training=True)
    return str(run_to_end(prepare(composed, folder=Path(place))).path)


# -- The text of a job script for Slurm --------------------------------------------------------------------------------

# In words of the script: SLURM_* come from Slurm; RAY_* are read by Ray and by covey train.
_BODY = r"""
@SETUP@set -euo pipefail

nodes=@NODES@
gpus=@GPUS@
mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [[ ${#names[@]} -ne $nodes ]]; then
    echo "the job has ${#names[@]} nodes, this script is for $nodes" >&2
    exit 2
fi
head=${names[0]}
cpus=${SLURM_CPUS_ON_NODE:-1}

# Who knows the token may run code in this Ray cluster: only its owner can read it. All nodes see this folder.
folder="${SLURM_SUBMIT_DIR:-$PWD}/.covey-slurm/$SLURM_JOB_ID"
(
    umask 077
    mkdir -p "$folder"
    python -c 'import secrets; print(secrets.token_hex(32))' > "$folder/ray-token"
)
unset RAY_AUTH_TOKEN
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/ray-token"

# The head's address, which the other nodes must reach; COVEY_HEAD_IP names another of its networks.
ip=${COVEY_HEAD_IP:-$(srun --overlap --nodes=1 --ntasks=1 -w "$head" hostname -I | awk '{ print $1; exit }')}
export RAY_ADDRESS="$ip:$((20000 + SLURM_JOB_ID % 10000))"

ray_steps=()
train=
finish() {
    trap '' TERM
    for step in ${ray_steps[@]+"${ray_steps[@]}"}; do kill -TERM "$step" 2> /dev/null || true; done
    for step in ${ray_steps[@]+"${ray_steps[@]}"}; do wait "$step" || true; done
    ray_steps=()
    rm -f "$folder/ray-token"
    rmdir "$folder" 2> /dev/null || true
}
trap finish EXIT

# Slurm says that the time is nearly over, or that somebody else needs the nodes.
stop() {
    again=yes
    [[ -n $train ]] || exit 143
    echo "SIGTERM: a checkpoint after this step, then the job queues again" >&2
    kill -TERM "$train" 2> /dev/null || true
}
trap stop TERM

wait_for_nodes() {
    python - "$1" << 'PYTHON'
import sys
import time

import ray

wanted, end, alive = int(sys.argv[1]), time.monotonic() + 600, 0
while alive < wanted:
    if time.monotonic() > end:
        sys.exit(f"{alive} of {wanted} nodes have joined Ray after ten minutes")
    try:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="error")
        alive = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        pass  # the head is still starting
    if alive < wanted:
        time.sleep(1)
print(f"{alive} of {wanted} nodes have joined Ray", file=sys.stderr)
PYTHON
}

srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$cpus" -w "$head" \
    ray start --head --node-ip-address="$ip" --port="${RAY_ADDRESS##*:}" --num-cpus="$cpus" --num-gpus="$gpus" \
    --include-dashboard=false --disable-usage-stats --block &
ray_steps+=($!)
wait_for_nodes 1

if [[ $nodes -gt 1 ]]; then
    others=$(IFS=,; echo "${names[*]:1}")
    srun --overlap --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --cpus-per-task="$cpus" -w "$others" \
        ray start --address="$RAY_ADDRESS" --num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats --block &
    ray_steps+=($!)
    wait_for_nodes "$nodes"
fi

@COMMAND@ &
train=$!
code=127
again=yes
while [[ -n $again ]]; do  # a signal ends the wait, not the training
    again= found=0
    wait "$train" || found=$?
    if [[ $found -ne 127 ]]; then code=$found; fi  # 127: it was waited for already
done

finish
if [[ $code -eq 75 ]]; then
    echo "not finished: job $SLURM_JOB_ID queues again and goes on from its checkpoint" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
"""


def script(
    *,
    nodes: int,
    gpus: int,
    seconds: int,
    margin: int,
    name: str,
    setup: str,
    directives: Sequence[tuple[str, str]],
    command: Sequence[str],
    made_by: str,
) -> str:
    """`command` is quoted here; `setup` is shell already, the user's own."""
    head = {
        "job-name": name,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(gpus)} if gpus else {}),
        "exclusive": "",
        "time": slurm_time(seconds),
        **dict(directives),
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:TERM@{max(60, margin // 2)}",
        "output": "covey-%j.out",
    }
    lines = [f"#SBATCH --{key}" + (f"={value}" if value else "") for key, value in head.items()]
    parts = {
        "@NODES@": str(nodes),
        "@GPUS@": str(gpus),
        "@SETUP@": f"{setup}\n\n" if setup else "",
        "@COMMAND@": _wrapped(command),
    }
    body = re.sub("|".join(parts), lambda mark: parts[mark[0]], _BODY)
    return "\n".join(["#!/bin/bash", f"# {made_by}", *lines]) + "\n" + body


def slurm_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def _wrapped(command: Sequence[str], width: int = 100) -> str:
    """Words in quotes where they need them, on several lines."""
    lines: list[str] = []
    for word in map(shlex.quote, command):
        if lines and len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n    ".join(lines)


# -- covey slurm: a job script that starts Ray on the nodes of a Slurm job and trains on them --------------------------

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

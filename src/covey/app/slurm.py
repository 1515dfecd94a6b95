"""Job scripts for Slurm: a Ray head on the first node, workers on the others, and covey train with cluster=ray."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from covey.app.compose import CommandLine, compose_command
from covey.errors import InputError

# SLURM_* variables are set by Slurm; RAY_* are read by Ray and by covey train.
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

# The token allows code to run in this Ray cluster: only its owner can read it. All nodes see this folder.
folder="${SLURM_SUBMIT_DIR:-$PWD}/.covey-slurm/$SLURM_JOB_ID"
(
    umask 077
    mkdir -p "$folder"
    python -c 'import secrets; print(secrets.token_hex(32))' > "$folder/ray-token"
)
unset RAY_AUTH_TOKEN
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/ray-token"

# The head's address, which the other nodes must reach; COVEY_HEAD_IP selects another network.
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

# Slurm sends SIGTERM when the time is nearly over or the job is preempted.
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
    if [[ $found -ne 127 ]]; then code=$found; fi  # 127: already waited for
done

finish
if [[ $code -eq 75 ]]; then
    echo "not finished: job $SLURM_JOB_ID is queued again and continues from its checkpoint" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
"""


@dataclass(frozen=True)
class Job:
    """What a job script is made from."""

    recipe: str
    settings: tuple[str, ...]
    nodes: int
    gpus: int  # per node
    mode: str
    seconds: int
    margin: int  # seconds
    name: str
    setup: str  # lines of shell that run first
    directives: tuple[tuple[str, str], ...]  # partition, account, ...
    made_by: str

    @property
    def from_file(self) -> bool:
        return self.recipe.endswith((".yaml", ".yml"))

    def all_settings(self) -> list[str]:
        """The user's settings, after those that the job implies unless the user sets them."""
        devices = self.nodes * max(1, self.gpus)
        learners = max(1, devices // 2) if self.mode == "async" else devices
        implied = {
            "cluster": "ray",
            "cluster.nodes": str(self.nodes),
            "cluster.learner_devices": str(learners),
            "mode": self.mode,
            "loop.max_minutes": f"{(self.seconds - self.margin) / 60:g}",
        }
        if self.mode == "async" and devices > 1:
            implied["cluster.rollout_devices"] = str(devices - learners)
        named = {word.partition("=")[0].lstrip("+") for word in self.settings}
        aliases = {"cluster": "cluster.name", "mode": "mode.name"}
        kept = [f"{key}={value}" for key, value in implied.items() if not named & {key, aliases.get(key, key)}]
        return [*kept, *self.settings]

    def check(self) -> None:
        """Raise an InputError about wrong settings now, not when the job starts."""
        args = CommandLine(settings=self.all_settings(), flags={"--validate-only": True})
        if not self.from_file:
            args.flags["--config-name"] = self.recipe
        compose_command(args, config_path=Path(self.recipe).expanduser() if self.from_file else None)

    def script(self) -> str:
        """The job script. The command is quoted here; `setup` is shell already."""
        head = {
            "job-name": self.name,
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            **({"gpus-per-node": str(self.gpus)} if self.gpus else {}),
            "exclusive": "",
            "time": slurm_time(self.seconds),
            **dict(self.directives),
            "requeue": "",
            "open-mode": "append",
            "signal": f"B:TERM@{max(60, self.margin // 2)}",
            "output": "covey-%j.out",
        }
        lines = [f"#SBATCH --{key}" + (f"={value}" if value else "") for key, value in head.items()]
        source = "--config" if self.from_file else "--config-name"
        command = ["covey", "train", source, self.recipe, "--unfinished", "75", *self.all_settings()]
        parts = {
            "@NODES@": str(self.nodes),
            "@GPUS@": str(self.gpus),
            "@SETUP@": f"{self.setup}\n\n" if self.setup else "",
            "@COMMAND@": _wrap(command),
        }
        body = re.sub("|".join(parts), lambda mark: parts[mark[0]], _BODY)
        return "\n".join(["#!/bin/bash", f"# {self.made_by}", *lines]) + "\n" + body


def _wrap(command: list[str]) -> str:
    """The quoted command, broken into lines."""
    lines: list[str] = []
    for word in map(shlex.quote, command):
        if lines and len(lines[-1]) + len(word) < 100:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n    ".join(lines)


def slurm_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def seconds_of(text: str) -> int:
    """A time as Slurm writes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""
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

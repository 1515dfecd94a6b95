#!/bin/bash
# covey slurm gvpo_math --nodes 2 --gpus-per-node 8 --time 04:00:00 --mode async mode.max_staleness=2
#SBATCH --job-name=covey-gvpo_math
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@720
#SBATCH --output=covey-%j.out

set -euo pipefail

nodes=2
gpus=8
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

covey train --config-name gvpo_math --unfinished 75 cluster=ray cluster.nodes=2 \
    cluster.learner_devices=8 mode=async loop.max_minutes=216 cluster.rollout_devices=8 \
    mode.max_staleness=2 &
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

#!/bin/bash
# A run on a Slurm cluster: a Ray over the job's nodes, the driver on the first of them.
#   sbatch deploy/slurm.sh --config qwen3_4b_nodes model.path=/shared/models/Qwen3-4B
# What follows the script's name is `stepwell train`'s. STEPWELL_VENV (default .venv) is an environment
# at one path that all nodes see, as the folder that sbatch is called in is. A job that is requeued,
# or submitted again, goes on from the last checkpoint.
#SBATCH --job-name=stepwell
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=stepwell-%j.log
#SBATCH --signal=B:TERM@300
set -euo pipefail

venv="$(realpath "${STEPWELL_VENV:-.venv}")"
port="${STEPWELL_RAY_PORT:-6379}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address="${nodes[0]}:$port"

# Ray of this job alone: a token of its own, and short paths for its sockets.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.stepwell-ray-$SLURM_JOB_ID.token"
export RAY_TMPDIR="/tmp/ray-$SLURM_JOB_ID" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # srun does not take it from sbatch
(umask 077 && head -c 32 /dev/urandom | base64 > "$RAY_AUTH_TOKEN_PATH")

started=()
# shellcheck disable=SC2329 # the trap calls it
end() {
    [[ ${#started[@]} -eq 0 ]] || kill -TERM "${started[@]}" 2> /dev/null || true
    rm -f "$RAY_AUTH_TOKEN_PATH"
}
trap end EXIT

on() { # NODE COMMAND…: a step of the job on one node, beside the others
    local node="$1"
    shift
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$@" &
    started+=("$!")
}

on "${nodes[0]}" "$venv/bin/ray" start --head --block --port="$port" --include-dashboard=false
for node in "${nodes[@]:1}"; do
    on "$node" "$venv/bin/ray" start --block --address="$address"
done

# Ray's nodes come one after the other; the run is placed once they are all there.
for _ in $(seq 120); do
    n="$("$venv/bin/python" - "$address" <<'PYTHON' || true
import sys
import ray

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
PYTHON
)"
    [[ "$n" == "${#nodes[@]}" ]] && break
    sleep 5
done
if [[ "$n" != "${#nodes[@]}" ]]; then
    echo "slurm.sh: ${n:-none} of ${#nodes[@]} nodes joined the Ray at $address in 10 minutes;" \
        "look into the srun output above, and whether port $port is free (STEPWELL_RAY_PORT)" >&2
    exit 1
fi

# Slurm's TERM, five minutes before the end, is for the driver: it saves a checkpoint and stops.
"$venv/bin/stepwell" train "$@" cluster.address="$address" &
driver="$!"
stopped=""
trap 'stopped=1; kill -TERM "$driver" 2> /dev/null || true' TERM
code=0
wait "$driver" || code="$?"
while [[ -n "$stopped" ]]; do # the trap ended the wait, not the driver, whose code counts
    stopped="" code=0
    wait "$driver" || code="$?"
done
exit "$code"

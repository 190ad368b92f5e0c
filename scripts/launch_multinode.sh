#!/usr/bin/env bash
# Train through a pipeline that spans several machines: torchrun on each of them, by hand or under Slurm.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/launch_multinode.sh [--dry-run] <flags of train.py>
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 scripts/launch_multinode.sh [--dry-run] <the same flags>
#
#   sbatch --nodes 2 --wrap "scripts/launch_multinode.sh <flags of train.py>"     the script starts itself on each node
#   srun --ntasks-per-node 1 scripts/launch_multinode.sh <flags of train.py>      the same, started by hand
#
# All nodes must see the project, the text and the run's folder (--run-dir) under the same paths. Options come first:
#
#   --dry-run   print the command of this node, and start nothing
#   --help      print this
#
# Environment. Wrong values are reported before anything starts, with exit code 2.
#
#   NNODES          nodes                                 default: Slurm's, or 1
#   NODE_RANK       this node's number, from 0            default: Slurm's; required if NNODES > 1
#   MASTER_ADDR     name or address of node 0             default: Slurm's first node; required if NNODES > 1
#   MASTER_PORT     a free port of node 0                 default: 29500; under Slurm derived from the job's number
#   NPROC_PER_NODE  ranks on this node                    default: one for each GPU; 1 without a GPU
#   MAX_RESTARTS    starts after a failure of any rank    default: 0; a run continues from its newest checkpoint
#   SCRIPT          the program to run                    default: scripts/train.py
#   GLOO_SOCKET_IFNAME  interface that gloo uses          default: the one that reaches MASTER_ADDR
#   OMP_NUM_THREADS     threads of a rank                 default: 1
#   MEGATRON_PP_PYTHON, MEGATRON_PP_VENV                  see scripts/setup_env.sh
#
# Exit codes are those of scripts/launch.py: 0 done, 128 + signal, 2 bad input, 3 damaged run to resume, 4 a checkpoint
# not written, 5 another run in the folder, 1 any other failure. See docs/multinode.md.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
self="$root/scripts/$(basename -- "${BASH_SOURCE[0]}")"

fail() {
    echo "launch_multinode.sh: $1" >&2
    exit 2
}

# check_number NAME LEAST MOST: fail unless the variable NAME holds a whole number from LEAST to MOST.
check_number() {
    local value="${!1}"
    if ! [[ "$value" =~ ^[0-9]{1,9}$ ]] || ((10#$value < $2 || 10#$value > $3)); then
        fail "$1 is '$value'; it must be a whole number from $2 to $3"
    fi
}

# The first of Slurm's nodes. Slurm writes the list of nodes in its own short form.
first_slurm_node() {
    local list="${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}"
    [[ -n "$list" ]] || fail "MASTER_ADDR is not set, and Slurm gives no list of nodes; give the address of node 0"
    command -v scontrol > /dev/null || fail "MASTER_ADDR is not set, and there is no scontrol to expand '$list'; give the address of node 0"
    scontrol show hostnames "$list" | head -n 1
}

# The network interface that has MASTER_ADDR, or else the one that reaches it. Empty if unknown.
interface_to_master() {
    command -v ip > /dev/null || return 0
    local address device
    address="$(getent ahosts "$MASTER_ADDR" | awk 'NR == 1 { print $1 }')"
    device="$(ip -o address show to "$address" 2> /dev/null | awk 'NR == 1 { print $2 }')"
    if [[ -z "$device" ]]; then
        device="$(ip -o route get "$address" 2> /dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')"
    fi
    echo "$device"
}

count_gpus() {
    if [[ -n "${SLURM_GPUS_ON_NODE:-}" ]]; then
        echo "$SLURM_GPUS_ON_NODE"
    elif command -v nvidia-smi > /dev/null; then
        nvidia-smi --list-gpus 2> /dev/null | grep -c '^GPU ' || true
    else
        echo 0
    fi
}

dry_run=""
while [[ $# -gt 0 ]]; do
    case "$1" in
        --help | -h) exec "$root/scripts/print_help.sh" "$self" ;;
        --dry-run) dry_run=1; shift ;;
        *) break ;;
    esac
done

# Within a Slurm job but not in a job step: start this script once on each node.
if [[ -n "${SLURM_JOB_ID:-}" && -z "${SLURM_STEP_ID:-}" && -z "${NODE_RANK:-}" ]]; then
    nodes="${NNODES:-${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}}"
    command=(srun --nodes "$nodes" --ntasks "$nodes" --ntasks-per-node 1 --kill-on-bad-exit=0 "$self" "$@")
    if [[ -n "$dry_run" ]]; then
        printf '%q ' "${command[@]}"; echo
        exit 0
    fi
    command -v srun > /dev/null || fail "SLURM_JOB_ID is set, but there is no srun; give NODE_RANK to start without Slurm"
    exec "${command[@]}"
fi

if [[ -n "${SLURM_STEP_ID:-}" ]]; then
    tasks="${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-1}}"
    nodes="${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}"
    [[ "$tasks" == "$nodes" ]] || fail "Slurm starts this script $tasks times on $nodes nodes; it must be once on each: srun --ntasks-per-node 1"
    NNODES="${NNODES:-$nodes}"
    NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-}}"
    MASTER_ADDR="${MASTER_ADDR:-$(first_slurm_node)}"
    # Two jobs on one node need two ports.
    MASTER_PORT="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 10000))}"
fi

NNODES="${NNODES:-1}"
check_number NNODES 1 100000
if ((10#$NNODES > 1)); then
    [[ -n "${NODE_RANK:-}" ]] || fail "NODE_RANK is not set; give this node's number, from 0 to $((10#$NNODES - 1))"
    [[ -n "${MASTER_ADDR:-}" ]] || fail "MASTER_ADDR is not set; give the name or address of node 0, as the other nodes reach it"
fi
NODE_RANK="${NODE_RANK:-0}"
check_number NODE_RANK 0 "$((10#$NNODES - 1))"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
getent ahosts "$MASTER_ADDR" > /dev/null || fail "MASTER_ADDR is '$MASTER_ADDR', which no name service resolves; give the name or address of node 0"
MASTER_PORT="${MASTER_PORT:-29500}"
check_number MASTER_PORT 1 65535
if [[ -z "${NPROC_PER_NODE:-}" ]]; then
    gpus="$(count_gpus)"
    NPROC_PER_NODE="$((gpus > 0 ? gpus : 1))"
fi
check_number NPROC_PER_NODE 1 4096
MAX_RESTARTS="${MAX_RESTARTS:-0}"
check_number MAX_RESTARTS 0 100000
SCRIPT="${SCRIPT:-$root/scripts/train.py}"
[[ -f "$SCRIPT" ]] || fail "SCRIPT is '$SCRIPT', which is not a file"

GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$(interface_to_master)}"
if [[ -n "$GLOO_SOCKET_IFNAME" ]]; then
    for interface in ${GLOO_SOCKET_IFNAME//,/ }; do
        [[ ! -d /sys/class/net || -e "/sys/class/net/$interface" ]] || fail "GLOO_SOCKET_IFNAME is '$GLOO_SOCKET_IFNAME', but this node has no interface '$interface'"
    done
    export GLOO_SOCKET_IFNAME
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Without a name service, or after the store is gone, c10d writes pages of warnings.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"

if [[ -n "$dry_run" ]]; then
    python="${MEGATRON_PP_PYTHON:-python}"
else
    python="$("$root/scripts/setup_env.sh" train)"
fi
command=(
    "$python" "$root/scripts/launch.py"
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE"
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts "$MAX_RESTARTS"
    "$SCRIPT" "$@"
)
if [[ -n "$dry_run" ]]; then
    echo "GLOO_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME OMP_NUM_THREADS=$OMP_NUM_THREADS $(printf '%q ' "${command[@]}")"
    exit 0
fi
exec "${command[@]}"

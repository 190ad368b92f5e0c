#!/usr/bin/env bash
# Set everything up and train a small GPT on real text through an interleaved pipeline of real processes.
#
#   scripts/train.sh                                 2 ranks x 2 model chunks; about two minutes on two CPU cores
#   scripts/train.sh --data my_text/ --num-layers 8  flags for train.py, after the defaults below; --help lists them
#   scripts/train.sh --pipeline-schedule zb_v        another schedule, with the chunks that it needs; or your own file
#   scripts/train.sh --config my.toml --seed 7       settings from a file instead of the defaults below; flags override it
#   scripts/train.sh --resume runs/20250131-120000   continue a run; its own flags are remembered
#
# NPROC=N starts N ranks. The default is one for each GPU, or two on the CPU if there are fewer than two GPUs.
# Each start makes a new folder under runs/ in the project. Ctrl-C ends the run after the current step, with a checkpoint.
# See scripts/setup_env.sh for MEGATRON_PP_VENV and MEGATRON_PP_PYTHON.
set -euo pipefail

if [[ -n "${NPROC:-}" && ! "$NPROC" =~ ^[1-9][0-9]{0,4}$ ]]; then
    echo "train.sh: NPROC is $NPROC; it must be a number of ranks from 1, as in NPROC=4" >&2
    exit 2
fi

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="$("$root/scripts/setup_env.sh" train)"

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec "$python" "$root/scripts/train.py" --help
fi

gpus=0
if command -v nvidia-smi > /dev/null; then
    gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
fi
ranks="${NPROC:-$((gpus >= 2 ? gpus : 2))}"

defaults=()
if [[ " $* " != *" --resume"* && " $* " != *" --config"* ]]; then
    defaults=(--overlap-p2p-comm --num-layers "$((ranks > 2 ? 2 * ranks : 4))")
    # A named schedule sets the number of model chunks. Without one the run uses interleaved 1F1B, also with --sequence-slices.
    if [[ " $* " != *" --pipeline-schedule"* ]]; then
        defaults+=(--virtual-pipeline-model-parallel-size 2)
    fi
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# On one machine gloo needs no host name and no other network.
if [[ -z "${GLOO_SOCKET_IFNAME:-}" && -e /sys/class/net/lo ]]; then
    export GLOO_SOCKET_IFNAME=lo
fi
exec "$python" "$root/scripts/launch.py" --standalone --nproc-per-node "$ranks" \
    "$root/scripts/train.py" "${defaults[@]}" "$@"

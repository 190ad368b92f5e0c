#!/usr/bin/env bash
# Everything of the race suite that needs a GPU, in one call and without installing anything; at most 8 minutes.
# Writes docs/gpu_results.md. Arguments: see scripts/gpu_check.py --help.
#
#   MEGATRON_PP_PYTHON=FILE   the interpreter to use, with a torch that has CUDA (default: python3)
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="${MEGATRON_PP_PYTHON:-python3}"

export OMP_NUM_THREADS=1
export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=10 480 "$python" "$root/scripts/gpu_check.py" "$@"

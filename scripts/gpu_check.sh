#!/usr/bin/env bash
# Everything of the race suite that needs a GPU, in one call; at most 8 minutes. Writes docs/gpu_results.md.
# Arguments: see scripts/gpu_check.py --help.
#
#   MEGATRON_PP_PYTHON=FILE   the interpreter to use, with a torch that has CUDA. Default: python3 if it has torch, else
#                             the environment of scripts/setup_env.sh, made where it is missing (a few minutes more)
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
if [[ -z "${MEGATRON_PP_PYTHON:-}" ]] && (cd / && python3 -c 'import torch') 2>/dev/null; then
    MEGATRON_PP_PYTHON=python3
fi
export MEGATRON_PP_PYTHON
python="$("$root/scripts/setup_env.sh")"

export OMP_NUM_THREADS=1
export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=10 480 "$python" "$root/scripts/gpu_check.py" "$@"

#!/usr/bin/env bash
# What nothing but a GPU can show: checked and measured in parts. A call ends within 20 minutes, and the next one goes
# on. Adds to docs/data/gpu_results.json what it finds, and makes docs/gpu_results.md from that. Installs nothing.
# Arguments: see scripts/gpu_check.py --help.
#
#   MEGATRON_PP_PYTHON=FILE   the interpreter to use, with a torch that has CUDA. Default: python3 if it has torch, else
#                             that of the environment of scripts/setup_env.sh, where it has been made
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
for python in "${MEGATRON_PP_PYTHON:-python3}" "${MEGATRON_PP_VENV:-$root/.venv}/bin/python"; do
    if (cd / && "$python" -c 'import torch') 2>/dev/null; then
        export OMP_NUM_THREADS=1
        export PYTHONPATH="$root:$root/scripts${PYTHONPATH:+:$PYTHONPATH}"
        exec timeout --kill-after=20 1180 "$python" "$root/scripts/gpu_check.py" "$@"
    fi
    [[ -z "${MEGATRON_PP_PYTHON:-}" ]] || break
done
echo "gpu_check.sh: ${MEGATRON_PP_PYTHON:-python3} cannot import torch; set MEGATRON_PP_PYTHON to one that can" >&2
exit 2

#!/usr/bin/env bash
# Checks and measures, in parts, what only a GPU can show. A call ends within 20 minutes, and the next call continues.
# It adds its results to docs/data/gpu_results.json, and makes docs/gpu_results.md from that file. It installs nothing.
# Arguments: see scripts/gpu_check.py --help.
#
#   MEGATRON_PP_PYTHON=FILE   the interpreter to use, with a torch that has CUDA. Default: python3 if it has torch, or
#                             the interpreter of the environment that scripts/setup_env.sh has made
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

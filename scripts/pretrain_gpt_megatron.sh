#!/usr/bin/env bash
# Set everything up and train Megatron-core's GPT through megatron_pp on this machine.
#
#   scripts/pretrain_gpt_megatron.sh                      2 pipeline ranks, 2 virtual stages each
#   PP=4 VP= scripts/pretrain_gpt_megatron.sh --compare   4 ranks, no virtual stages, compared with Megatron's own schedule
#   VP= MEGATRON_PP_OVERLAP_P2P_COMM=1 scripts/pretrain_gpt_megatron.sh   with a setting of docs/megatron.md
#
# PP, VP, DP   pipeline ranks, virtual stages per rank (empty: none), data-parallel replicas
# See scripts/setup_env.sh for MEGATRON_PP_VENV and MEGATRON_PP_PYTHON. Other arguments are passed to the Python script; see --help.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="$("$root/scripts/setup_env.sh" megatron)"
script="$root/scripts/pretrain_gpt_megatron.py"

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec "$python" "$script" --help
fi

pp="${PP:-2}" vp="${VP-2}" dp="${DP:-1}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
virtual=()
if [[ -n "$vp" ]]; then
    virtual=(--num-virtual-stages-per-pipeline-rank "$vp")
fi

exec "$python" "$root/scripts/launch.py" --standalone --nproc-per-node "$((pp * dp))" \
    "$script" --pipeline-model-parallel-size "$pp" ${virtual[@]+"${virtual[@]}"} "$@"

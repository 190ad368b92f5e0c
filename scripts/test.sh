#!/usr/bin/env bash
# Sets up the environment and runs all tests: first unit, then functional (real processes).
#
#   scripts/test.sh                              everything
#   scripts/test.sh -k layout -x                 arguments for pytest, in both halves
#   scripts/test.sh tests/unit_tests/test_x.py   paths (as seen from here): these only
#   scripts/test.sh tests/unit_tests -m "not slow"   unit tests without what takes more than a second
#
#   MEGATRON_PP_TEST_JOBS=N   tests at a time (default: the number of cores, at most 8; half for functional tests, from 4 on,
#                             each of which starts several processes)
# See scripts/setup_env.sh for MEGATRON_PP_VENV and MEGATRON_PP_PYTHON.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="$("$root/scripts/setup_env.sh" train viz megatron test)"

export OMP_NUM_THREADS=1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [[ -d /sys/class/net/lo ]]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi

cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
jobs="${MEGATRON_PP_TEST_JOBS:-$((cores < 8 ? cores : 8))}"
functional_jobs="${MEGATRON_PP_TEST_JOBS:-$((jobs > 3 ? jobs / 2 : jobs + 1))}" # they wait more than they compute

names_a_path=false
for argument in "$@"; do
    if [[ "$argument" != -* && ( "$argument" == */* || "$argument" == *.py* ) && -e "${argument%%::*}" ]]; then
        names_a_path=true
    fi
done

run_pytest() { # JOBS DISTRIBUTION ARGUMENT...
    local jobs="$1" distribution="$2"
    shift 2
    "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -n "$jobs" --dist "$distribution" \
        --no-loadscope-reorder "$@"
}

# A functional test file starts its processes once, for all of its tests: one worker runs the whole file.
if $names_a_path; then
    run_pytest "$functional_jobs" loadfile "$@"
    exit
fi

NOTHING_COLLECTED=5
status=0
empty_halves=0
for half in "unit_tests $jobs worksteal" "functional_tests $functional_jobs loadfile"; do
    read -r folder at_a_time distribution <<<"$half"
    printf '\n== %s\n' "$folder"
    code=0
    run_pytest "$at_a_time" "$distribution" "$root/tests/$folder" "$@" || code=$?
    if [[ $code -eq $NOTHING_COLLECTED ]]; then
        empty_halves=$((empty_halves + 1)) # a selection such as -k may leave one half empty, but not both
    elif [[ $code -ne 0 ]]; then
        status=$code
    fi
done
if [[ $empty_halves -eq 2 ]]; then
    status=$NOTHING_COLLECTED
fi
exit "$status"

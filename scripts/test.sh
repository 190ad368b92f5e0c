#!/usr/bin/env bash
# Sets up the environment, and runs all tests: unit tests, and functional tests with real processes.
#
#   scripts/test.sh                              everything
#   scripts/test.sh -k layout -x                 arguments for pytest
#   scripts/test.sh tests/unit_tests/test_x.py   only these paths, relative to the working directory
#   scripts/test.sh tests/unit_tests -m "not slow"   unit tests without those of more than a second
#
#   MEGATRON_PP_TEST_JOBS=N   test files that run at the same time (default: the number of cores plus one, or plus
#                             three for the whole suite; at most 8)
# See scripts/setup_env.sh for MEGATRON_PP_VENV and MEGATRON_PP_PYTHON.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
case "${1:-}" in --help | -h) exec "$root/scripts/print_help.sh" "${BASH_SOURCE[0]}" ;; esac
python="$("$root/scripts/setup_env.sh" train viz megatron test)"

export OMP_NUM_THREADS=1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if [[ -d /sys/class/net/lo ]]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi

cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"

names_a_path=false
for argument in "$@"; do
    if [[ "$argument" != -* && ( "$argument" == */* || "$argument" == *.py* ) && -e "${argument%%::*}" ]]; then
        names_a_path=true
    fi
done
more=1
if ! $names_a_path; then
    set -- "$root/tests" "$@"
    more=3
fi
# Tests of deadlines wait, so their core is free. Functional tests wait for a third of their time.
jobs="${MEGATRON_PP_TEST_JOBS:-$((cores + more < 8 ? cores + more : 8))}"

# One worker runs a whole file, because its tests share processes and plans. tests/conftest.py has the order of files.
exec "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -n "$jobs" --dist loadfile --no-loadscope-reorder "$@"

#!/usr/bin/env bash
# Makes the environment in which the other scripts run, and prints its interpreter as the only line on stdout.
#
#   scripts/setup_env.sh [EXTRA...]        extras of setup.py, such as: train test megatron
#   scripts/setup_env.sh --find 3.12       only print an interpreter of this version; exit 1 if there is none
#
#   MEGATRON_PP_VENV=DIR     the environment's folder (default: .venv beside setup.py)
#   MEGATRON_PP_PYTHON_VERSION=3.12   make it with this version of Python (default: python3, if that is 3.10 or newer)
#   MEGATRON_PP_TORCH=N      install this release of torch in place of the one in scripts/constraints.txt
#   MEGATRON_PP_PYTHON=FILE  use this interpreter and install nothing (for clusters with their own torch)
#
# scripts/constraints.txt has the releases of torch and Megatron-core for each version of Python.
# A second run with the same extras only checks the environment. The script may be interrupted, because it marks an
# installation only at its end. It may run from any directory, and several times at once.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
case "${1:-}" in --help | -h) exec "$root/scripts/print_help.sh" "${BASH_SOURCE[0]}" ;; esac
say() { printf '%s\n' "$*" >&2; }
die() { say "setup_env.sh: $*"; exit 1; }

can_make_environments() { # PYTHON [VERSION]: whether it runs, has the modules that are needed, and is of that version
    "$1" -c '
import sys, venv, ensurepip
version = sys.version_info[:2]
sys.exit(version < (3, 10) or sys.argv[1] not in ("", "%d.%d" % version))' "${2:-}" 2>/dev/null
}

python_of() { # VERSION: an interpreter of this version, on PATH or of pyenv
    local candidate
    while read -r candidate; do
        if can_make_environments "$candidate" "$1"; then
            command -v -- "$candidate"
            return
        fi
    done < <(
        printf '%s\n' python3 "python$1"
        find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -maxdepth 1 -name "$1.*" 2>/dev/null | sort -rV | sed 's:$:/bin/python3:'
    )
    return 1
}

if [[ "${1:-}" == --find ]]; then
    python_of "${2:?a version, such as 3.12}"
    exit
fi

for extra in "$@"; do
    [[ "$extra" != -* ]] || die "$extra is not an extra of setup.py (--help)"
done

if [[ -n "${MEGATRON_PP_PYTHON:-}" ]]; then
    command -v -- "$MEGATRON_PP_PYTHON" >/dev/null || die "MEGATRON_PP_PYTHON is $MEGATRON_PP_PYTHON, which is not a program"
    command -v -- "$MEGATRON_PP_PYTHON"
    exit 0
fi

venv="${MEGATRON_PP_VENV:-$root/.venv}"
mkdir -p -- "$(dirname -- "$venv")"
venv="$(cd -- "$(dirname -- "$venv")" && pwd -P)/$(basename -- "$venv")"
python="$venv/bin/python"
stamp="$venv/.megatron_pp_stamp"     # line 1: fingerprint of the installation's sources; line 2: its extras
half_made="$venv.being_made"         # exists while the bare environment is being made

base_python() { # the interpreter that the environment is made with
    local candidate wanted="${MEGATRON_PP_PYTHON_VERSION:-}"
    if [[ -n "$wanted" ]]; then
        python_of "$wanted" || die "MEGATRON_PP_PYTHON_VERSION is $wanted, and there is no python$wanted with the modules venv and ensurepip on PATH or of pyenv"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if can_make_environments "$candidate"; then
            command -v -- "$candidate"
            return
        fi
    done
    die "no Python >= 3.10 with the modules venv and ensurepip was found (on Debian: apt install python3-venv)"
}

check_version() { # that an existing environment has the wanted Python
    if [[ -z "${MEGATRON_PP_PYTHON_VERSION:-}" || ! -x "$python" || -e "$half_made" ]]; then return; fi
    local found
    found="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    [[ "$found" == "$MEGATRON_PP_PYTHON_VERSION" ]] \
        || die "MEGATRON_PP_PYTHON_VERSION is $MEGATRON_PP_PYTHON_VERSION and $venv is of Python $found; set MEGATRON_PP_VENV to another place, or remove it"
}

constraints() { # the exact versions to install
    sed ${MEGATRON_PP_TORCH:+-e "s/^torch==[^;]*/torch==$MEGATRON_PP_TORCH/"} -e '' -- "$root/scripts/constraints.txt"
}

fingerprint() { # of all that the installation depends on, with the project's path
    { cat -- "$root/setup.py"; constraints; printf '%s\n' "$root"; "$python" -VV; } | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

installed_extras() { # the extras of an installation that is still valid; fails otherwise
    [[ -x "$python" && -f "$stamp" && "$(head -n 1 -- "$stamp")" == "$(fingerprint)" ]] || return 1
    sed -n 2p -- "$stamp"
}

is_ready() { # EXTRA...
    local have extra
    have="$(installed_extras)" || return 1
    for extra in "$@"; do [[ " $have " == *" $extra "* ]] || return 1; done
}

make_venv() {
    if [[ -x "$python" && ! -e "$half_made" ]]; then return; fi
    if [[ -e "$venv" && ! -e "$half_made" && -n "$(ls -A -- "$venv")" ]]; then
        die "$venv exists and is not a Python environment; remove it, or set MEGATRON_PP_VENV to another place"
    fi
    local base
    base="$(base_python)"
    say "Set-up 1/4: a Python environment in $venv ..."
    touch -- "$half_made"
    "$base" -m venv --clear "$venv" >&2
    rm -f -- "$half_made"
}

compile_installed() { # OPTION...: run compileall in place of this shell. It fails for files that are for other releases of Python
    # Left out is what these scripts seldom import: it is compiled when it is imported.
    local seldom='/(tests?|_internal)/|/site-packages/(fontTools|mypy|mypyc|onnx|onnx_ir|onnxscript|pip|selenium)/'
    cd -- "$venv" # the pattern is for paths within it, and -p adds it to the names in the compiled files
    exec "$python" -m compileall -q "$@" -x "$seldom" -p "$venv" -- lib >/dev/null 2>&1
}

compile_ours() { # else each process that starts at the same time compiles the package
    (cd -- "$root" && "$python" -m compileall -q megatron_pp testkit tests benchmarks examples scripts) >/dev/null 2>&1 || true
}

install() { # EXTRA...
    local joined pip
    joined="$(IFS=,; printf '%s' "$*")"
    constraints >"$venv/constraints.txt"
    pip=("$python" -m pip install --disable-pip-version-check --no-compile --constraint "$venv/constraints.txt")
    [[ -t 2 ]] || pip+=(--quiet) # progress bars only on a terminal
    export PIP_CONSTRAINT=/dev/null # a machine's own pip settings may constrain torch to an older release
    rm -f -- "$stamp"
    # torch is installed first and alone: megatron-core and others accept any version, so the pinned one must be there.
    say "Set-up 2/4: torch (once; a few minutes if it has to be downloaded) ..."
    compile_ours & # on a core that pip leaves idle
    "${pip[@]}" torch setuptools wheel >&2
    compile_installed -j 1 &
    local compiling=$!
    # shellcheck disable=SC2064  # the number as it is now
    trap "kill $compiling 2>/dev/null || true" EXIT
    say "Set-up 3/4: megatron_pp${joined:+ with extras $joined} ..."
    "${pip[@]}" --no-build-isolation --editable "$root${joined:+[$joined]}" >&2
    if [[ " $* " == *" test "* ]]; then
        # Transformer Engine's Python, without its compiled part, for which the tests have a stand-in. It is in a folder
        # of its own, because Megatron-core assumes that any transformer_engine that it finds is complete.
        "${pip[@]}" --no-deps --upgrade --target "$venv/transformer_engine_python" transformer-engine >&2
    fi
    say "Set-up 4/4: compiling and importing what was installed ..."
    wait "$compiling" || true
    trap - EXIT
    (compile_installed -j 0) || true
    (cd / && "$python" -c 'import torch, megatron_pp') || die "torch and megatron_pp cannot be imported from $venv"
    printf '%s\n%s\n' "$(fingerprint)" "$*" >"$stamp.new"
    mv -f -- "$stamp.new" "$stamp"
}

check_version
if ! is_ready "$@"; then
    if command -v flock >/dev/null; then
        exec 9>"$venv.lock"
        flock 9
    fi
    if ! is_ready "$@"; then # another run may have installed it meanwhile
        make_venv
        # Installed extras stay: train.sh after test.sh must not drop the tests' packages from the list.
        read -r -a wanted <<<"$( { installed_extras || true; printf '%s\n' "$@"; } | tr ' ' '\n' | sort -u | tr '\n' ' ')"
        install ${wanted[@]+"${wanted[@]}"}
    fi
fi
printf '%s\n' "$python"

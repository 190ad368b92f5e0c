#!/usr/bin/env bash
# Run the tests of the Megatron-core plug-in under several releases of Megatron-core, each in a virtual environment of its own.
#
#   scripts/test_megatron_versions.sh                         the newest patch of each minor release that supports this Python
#   scripts/test_megatron_versions.sh newest                  the newest release on the package index that supports any Python of this machine;
#                                                             writes its row in docs/data/megatron_releases.csv, and says what to do with it
#   scripts/test_megatron_versions.sh 0.16.1 ~/Megatron-LM    a release from PyPI, and a source checkout in its present state
#
# Each environment has its own Megatron-core, installed without dependencies. It takes torch, pytest and the rest from the environment of
# PYTHON. VENVS is the folder in which the environments are made (default: a temporary folder, removed at the end). TESTS are the tests to
# run, with options of pytest (default: all tests of the plug-in). DEADLINE is in seconds, for one release. RECORD=1 writes a row for each
# release into docs/data/megatron_releases.csv. PARITY are flags of scripts/parity_table.py: they choose what is then compared with one process.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "${1:-}" in --help | -h) exec "$here/print_help.sh" "${BASH_SOURCE[0]}" ;; esac
root="$(dirname "$here")"
python="${PYTHON:-python}"
versions=("$@")
for version in ${versions[@]+"${versions[@]}"}; do
    if [[ "$version" == -* ]]; then
        echo "test_megatron_versions.sh: $version is not a release; give newest, releases such as 0.16.1, or checkouts (--help)" >&2
        exit 2
    fi
done
takes_new="$("$python" -c 'import sys; print(int(sys.version_info >= (3, 12)))')"
if [[ ${#versions[@]} -eq 0 ]]; then
    versions=("0.14.*" "0.15.*" "0.16.*") # the releases for Python 3.10 and 3.11
    if [[ "$takes_new" == 1 ]]; then versions=("0.16.*" "0.17.*" "0.18.*" "0.19.*"); fi
fi

newest_for() { # PYTHON: the newest release on the index for this Python
    "$1" -m pip index versions --disable-pip-version-check megatron-core 2>/dev/null | sed -n 's/^megatron-core (\(.*\))$/\1/p'
}

if [[ "${versions[*]}" == newest ]]; then
    newest="$(newest_for "$python")" of=""
    for minor in 3.10 3.11 3.12 3.13 3.14; do
        one="$("$here/setup_env.sh" --find "$minor")" || continue
        found="$(newest_for "$one")"
        if [[ -n "$found" && "$found" != "$newest" && "$(printf '%s\n' "$newest" "$found" | sort -V | tail -n 1)" == "$found" ]]; then
            newest="$found" of="$minor"
        fi
    done
    if [[ -z "$newest" ]]; then
        echo "the package index has answered with no release of megatron-core; try: $python -m pip index versions megatron-core" >&2
        exit 1
    fi
    if [[ -n "$of" ]]; then # only a newer Python can install it
        echo "megatron-core $newest needs a newer Python than $python; it runs in .venv-$of, on Python $of"
        python="$(MEGATRON_PP_PYTHON='' MEGATRON_PP_PYTHON_VERSION="$of" MEGATRON_PP_VENV="$root/.venv-$of" "$here/setup_env.sh" train viz megatron test)"
    fi
    versions=("$newest") RECORD=1 PARITY="${PARITY:---pp 2 --deadline 60}"
fi
if [[ -z "${VENVS:-}" ]]; then
    VENVS="$(mktemp -d)"
    trap 'rm -rf "$VENVS"' EXIT
fi
mkdir -p "$VENVS"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

parent_packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
transformer_engine="$("$python" -c 'import sys; print(sys.prefix)')/transformer_engine_python" # of scripts/setup_env.sh

# Make an environment that finds the parent's packages after its own; print its folder of packages.
make_environment() {
    local folder="$1"
    "$python" -m venv --without-pip "$folder"
    local packages
    packages="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$parent_packages" >"$packages/parent.pth"
    if [[ -d "$transformer_engine" ]]; then ln -s "$transformer_engine" "$folder/transformer_engine_python"; fi
    echo "$packages"
}

failed=()
for version in "${versions[@]}"; do
    folder="$VENVS/megatron-core-$(basename "${version//\*/x}")"
    rm -rf "$folder"
    packages="$(make_environment "$folder")"
    if [[ -d "$version" ]]; then
        cp -r "$version/megatron" "$packages/megatron"
        name="$(basename "$version")"
        if commit="$(git -C "$version" rev-parse --short=8 HEAD 2>/dev/null)"; then name="$name $commit"; fi
    else
        "$python" -m pip install --quiet --no-deps --disable-pip-version-check --target "$packages" "megatron-core==$version"
        name="$(basename "$packages"/megatron_core-*.dist-info .dist-info)"
        name="${name#megatron_core-}"
    fi
    echo "== megatron-core $name"
    passed=true
    # shellcheck disable=SC2086  # several words
    (cd "$root" && timeout "${DEADLINE:-900}" "$folder/bin/python" -m pytest -q -p no:cacheprovider --junitxml "$folder/tests.xml" \
        ${TESTS:-tests/unit_tests/integrations tests/functional_tests/test_megatron_*.py}) || passed=false
    if [[ -n "${RECORD:-}" ]]; then
        "$folder/bin/python" "$here/megatron_releases.py" "$name" --package "$packages" --tests "$folder/tests.xml" --parity="${PARITY:-}" || passed=false
    fi
    if ! $passed; then failed+=("$name"); fi
done

if [[ ${#failed[@]} -gt 0 ]]; then
    echo "failed under megatron-core: ${failed[*]}" >&2
    exit 1
fi
echo "passed under megatron-core: ${versions[*]}"

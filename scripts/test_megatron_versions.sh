#!/usr/bin/env bash
# Run the tests of the Megatron-core plug-in under several releases of Megatron-core, each in a virtual environment of its own.
#
#   scripts/test_megatron_versions.sh                         0.14, 0.15 and 0.16, the newest patch of each
#   scripts/test_megatron_versions.sh 0.16.1 ~/Megatron-LM    a release from PyPI, and a source checkout as it stands
#
# Every environment takes torch, pytest and the rest from the one that PYTHON runs in, and only Megatron-core is its own, installed
# without dependencies. VENVS is where they are made (default: a temporary folder, removed at the end). TESTS are the tests that run, with
# options of pytest (default: all of the plug-in's); DEADLINE is in seconds, for one release.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(dirname "$here")"
python="${PYTHON:-python}"
versions=("$@")
if [[ ${#versions[@]} -eq 0 ]]; then
    versions=("0.14.*" "0.15.*" "0.16.*")
fi
if [[ -z "${VENVS:-}" ]]; then
    VENVS="$(mktemp -d)"
    trap 'rm -rf "$VENVS"' EXIT
fi
mkdir -p "$VENVS"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"

parent_packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# Make an environment with the parent's packages behind its own; print its interpreter.
make_environment() {
    local folder="$1"
    "$python" -m venv --without-pip "$folder"
    local packages
    packages="$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$parent_packages" >"$packages/parent.pth"
    echo "$packages"
}

failed=()
for version in "${versions[@]}"; do
    folder="$VENVS/megatron-core-$(basename "${version//\*/x}")"
    rm -rf "$folder"
    packages="$(make_environment "$folder")"
    if [[ -d "$version" ]]; then
        cp -r "$version/megatron" "$packages/megatron"
    else
        "$python" -m pip install --quiet --no-deps --disable-pip-version-check --target "$packages" "megatron-core==$version"
    fi
    echo "== megatron-core $version"
    # shellcheck disable=SC2086  # several words
    if ! (cd "$root" && timeout "${DEADLINE:-900}" "$folder/bin/python" -m pytest -q -p no:cacheprovider \
        ${TESTS:-tests/unit_tests/integrations tests/functional_tests/test_megatron_*.py}); then
        failed+=("$version")
    fi
done

if [[ ${#failed[@]} -gt 0 ]]; then
    echo "failed under megatron-core: ${failed[*]}" >&2
    exit 1
fi
echo "passed under megatron-core: ${versions[*]}"

#!/usr/bin/env bash
# Builds the source distribution and the wheel, checks both, and tries the wheel in an empty environment.
#
#   scripts/check_wheel.sh [DIR]           the folder for the two files (default: dist)
#
#   MEGATRON_PP_URL=https://...            the repository's address, for the links of the package's page
#   MEGATRON_PP_PYTHON_VERSION=3.12        use this version of Python; MEGATRON_PP_VENV names its environment's folder
# Only the wheel is installed in the empty environment. It finds the dependencies in the other environment.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
case "${1:-}" in --help | -h) exec "$root/scripts/print_help.sh" "${BASH_SOURCE[0]}" ;; esac
if [[ $# -gt 1 || "${1:-}" == -* ]]; then
    echo "check_wheel.sh: give at most one folder; $* was given (--help)" >&2
    exit 2
fi
mkdir -p -- "${1:-dist}"
dist="$(cd -- "${1:-dist}" && pwd -P)"
if [[ -n "$(find "$dist" -maxdepth 1 -name 'megatron_pp-*')" ]]; then
    echo "check_wheel.sh: $dist already has files of a release; remove them or name another folder" >&2
    exit 2
fi
python="$("$root/scripts/setup_env.sh" release test)"
work="$(mktemp -d)"
trap 'rm -rf -- "$work"' EXIT

"$python" -m build --no-isolation --outdir "$dist" "$root"
"$python" -m twine check --strict "$dist"/megatron_pp-*
"$python" - "$dist"/megatron_pp-* <<'PY'
import collections, sys, tarfile, zipfile

for path in sys.argv[1:]:
    wheel = path.endswith(".whl")
    names = zipfile.ZipFile(path).namelist() if wheel else [one.name for one in tarfile.open(path) if one.isfile()]
    folders = collections.Counter("/".join(name.split("/")[:-1][: 2 if wheel else 3]) for name in names)
    print(f"{path}: {len(names)} files", *(f"{folders[one]:5d}  {one}" for one in sorted(folders)), sep="\n")
PY

unset PYTHONPATH # with it pip could find the package in a checkout, and install nothing
"$python" -m venv --without-pip "$work/empty"
"$python" -m pip --python "$work/empty/bin/python" install --quiet --no-deps --no-index "$dist"/megatron_pp-*.whl
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(echo "$work"/empty/lib/python3*/site-packages)/libraries.pth"
cd -- "$work"
empty/bin/megatron-pp --version
empty/bin/megatron-pp plan -P 4 -M 8 >/dev/null
cat >typed.py <<'PY'
from megatron_pp import build_plan, deallocate_output_tensor, get_forward_backward_func

reveal_type(build_plan)
reveal_type(get_forward_backward_func)
reveal_type(deallocate_output_tensor)
PY
"$python" -m mypy --python-executable empty/bin/python typed.py | tee types
if grep -qE 'is "Any"|missing library stubs|import-not-found' types; then
    echo "check_wheel.sh: mypy does not find the types of the installed package" >&2
    exit 1
fi
echo "check_wheel.sh: $(cd -- "$dist" && ls -- megatron_pp-* | tr '\n' ' ')can be released"

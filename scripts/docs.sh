#!/usr/bin/env bash
# Sets up the environment and builds the documentation into site/; a warning is an error. Open site/index.html.
#
#   scripts/docs.sh            build
#   scripts/docs.sh serve      build, and serve it at http://127.0.0.1:8000 (searching needs a server)
#
# Other arguments are passed to mkdocs. See scripts/setup_env.sh for MEGATRON_PP_VENV and MEGATRON_PP_PYTHON.
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
case "${1:-}" in --help | -h) exec "$root/scripts/print_help.sh" "${BASH_SOURCE[0]}" ;; esac
python="$("$root/scripts/setup_env.sh" viz docs)"
command="${1:-build}"
shift || true
export NO_MKDOCS_2_WARNING=1 # Material's notice about releases to come
cd -- "$root"
exec "$python" -m mkdocs "$command" --strict "$@"

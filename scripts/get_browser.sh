#!/usr/bin/env bash
# Installs Debian's Chromium and its driver, in which tests open the HTML drawings. Does nothing if there is a browser
# with its driver. Installs nothing without the right to: the tests are then skipped, with the reason.
set -euo pipefail

case "${1:-}" in --help | -h) exec "$(dirname -- "${BASH_SOURCE[0]}")/print_help.sh" "${BASH_SOURCE[0]}" ;; esac
for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" > /dev/null && command -v chromedriver > /dev/null; then
        exit 0
    fi
done
if ! command -v apt-get > /dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "get_browser: no Chromium with chromedriver, and no root with apt-get to install them" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } > /dev/null; then
    echo "get_browser: apt-get could not install chromium and chromium-driver" >&2
fi

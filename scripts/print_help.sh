#!/usr/bin/env bash
# Prints the comment at the head of a script, which is its help.
#
#   scripts/print_help.sh FILE
set -euo pipefail

file="${1:?a script}"
case "$file" in --help | -h) file="${BASH_SOURCE[0]}" ;; esac
sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' -- "$file"

#!/usr/bin/env python
"""Make the picture and the answer on docs/check.md: what `megatron-pp check` says of examples/check/recipe.yaml.

python scripts/check_picture.py [--check]

`--check` compares both with what the command says now.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_pp.tools.cli.terminal import wrapped  # noqa: E402

PAGE, PICTURE = ROOT / "docs" / "check.md", ROOT / "docs" / "images" / "check.svg"
COMMAND = "megatron-pp check --gpus 64 --gpu h100 --release 0.19.2 recipe.yaml"
FOLDER = ROOT / "examples" / "check"
COLUMNS = 96
PIXELS = (8.43, 19)  # of a character of 14 pixels: width, height
WORDS = ("error", "risk", "note", "change")
STYLE = """\
text { fill: #1f2328 } rect { fill: #f6f8fa }
.error { fill: #cf222e } .risk { fill: #9a6700 } .note { fill: #0969da } .change { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } rect { fill: #0d1117 }
  .error { fill: #ff7b72 } .risk { fill: #e3b341 } .note { fill: #79c0ff } .change { fill: #7ee787 }
}"""
BLOCK = re.compile(r"(<!-- made by a command: check -->\n).*?(<!-- end of check -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    checked = parser.parse_args().check
    lines = [part for line in said().split("\n") for part in wrapped(line, COLUMNS, _hang(line)).split("\n")]
    block = "\n".join(["    $ " + COMMAND, *(f"    {line}".rstrip() for line in lines)])
    made = {
        PAGE: BLOCK.sub(lambda found: f"{found[1]}\n{block}\n\n{found[2]}", PAGE.read_text(encoding="utf-8")),
        PICTURE: picture(["$ " + COMMAND, *lines]),
    }
    for path, text in made.items():
        if not checked:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is not what {Path(__file__).name} makes now: run it without --check")


def _hang(line: str) -> int | None:
    """Columns before the lines that follow one of a finding."""
    return 9 if line.strip().partition(":")[0] in WORDS[:3] else None


def said() -> str:
    command = [sys.executable, "-m", "megatron_pp", *COMMAND.split()[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 3):
        sys.exit(done.stderr)
    return done.stdout.rstrip("\n")


def picture(lines: list[str]) -> str:
    width, height = round(COLUMNS * PIXELS[0]) + 40, len(lines) * PIXELS[1] + 36
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="What megatron-pp check prints" font-family="ui-monospace, Menlo, Consolas, monospace" '
        f'font-size="14">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8"/>',
    ]
    for number, line in enumerate(lines):
        at = f'x="20" y="{18 + (number + 0.75) * PIXELS[1]:g}" xml:space="preserve"'
        rows.append(f"<text {at}{_weight(line)}>{_coloured(line)}</text>")
    return "\n".join([*rows, "</svg>", ""])


def _weight(line: str) -> str:
    return ' font-weight="bold"' if line and not line[0].isspace() else ""


def _coloured(line: str) -> str:
    before, colon, after = line.partition(":")
    word = before.strip()
    if not colon or word not in WORDS:
        return escape(line)
    indent = before[: len(before) - len(word)]
    return f'{indent}<tspan class="{word}">{word}:</tspan>{escape(after)}'


if __name__ == "__main__":
    main()

"""Writes the answers that two pages show: that of `megatron-pp check` on docs/check.md, and that of `megatron-pp
advise` with its picture on docs/advise.md.

python scripts/page_answers.py [--check] [check] [advise]

`--check` writes nothing, and compares the pages with what the commands print now. `advise` takes 15 s of CPU time.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_pp.tools.cli.terminal import wrapped  # noqa: E402
from scripts.made_parts import MadePart  # noqa: E402

DOCS = ROOT / "docs"
CHECK = "megatron-pp check --gpus 64 --gpu h100 --release 0.19.2 recipe.yaml"
ADVISE = (
    "megatron-pp advise -P 8 --memory-gb 80 --activation-gb 2 --forward-ms 1 --backward-ms 1 --weight-ms 1 "
    "--p2p-ms 0.1 --global-batch 64 --plot front.svg"
)
PICTURE = DOCS / "images" / "advise.svg"
COLUMNS = 96
FINDINGS = ("error", "risk", "note")
HANG = 9
"""Columns by which all lines of a finding after its first one are indented."""
_OF_TERMINALS = ("COLUMNS", "FORCE_COLOR")
"""Variables that change the width or the bytes of an answer. Pages show the output to a file without them."""
REASONS = "Why not another"
SHOWN = ("interleaved_zb V=3 ", "breadth_first V=3 ", "auto_v ")
"""The rows of the table of reasons that the page shows: a slower plan, one that recomputes, one that was not built."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="check, advise, or both; default both")
    arguments = parser.parse_args()
    unknown = set(arguments.pages) - set(MADE)
    if unknown:
        parser.error(f"no such page: {', '.join(sorted(unknown))}; pages are {' and '.join(MADE)}")
    stale = 0
    for page in arguments.pages or MADE:
        for path, text in MADE[page]().items():
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
            elif path.read_text(encoding="utf-8") != text:
                name = path.relative_to(ROOT)
                print(f"{name} is not what {Path(__file__).name} makes now: run it without --check", file=sys.stderr)
                stale = 1
    return stale


def check_page() -> dict[Path, str]:
    """File -> its new text, for docs/check.md."""
    page = DOCS / "check.md"
    answer = printed(CHECK, ROOT / "examples" / "check", codes=(1,))
    lines = [wrapped(line, COLUMNS, _hang(line)) for line in answer.split("\n")]
    return {page: _renewed(page, "check", "text", [f"$ {CHECK}", *"\n".join(lines).split("\n")])}


def _hang(line: str) -> int | None:
    return HANG if line.strip().partition(":")[0] in FINDINGS else None


def advise_page() -> dict[Path, str]:
    """File -> its new text, for docs/advise.md and its picture."""
    page = DOCS / "advise.md"
    with tempfile.TemporaryDirectory() as folder:
        answer = printed(ADVISE, Path(folder), codes=(0,))
        picture = (Path(folder) / "front.svg").read_text(encoding="utf-8")
    lines = [line.rstrip() for line in answer.split("\n") if line != "wrote front.svg"]
    return {page: _renewed(page, "advise", "text", shortened(lines)), PICTURE: picture}


def shortened(lines: list[str]) -> list[str]:
    """The answer with some of its reasons. ``...`` replaces rows that are left out."""
    head = lines.index(REASONS) + 4  # an empty line, the names of the columns, and a rule
    short = lines[:head]
    for row in lines[head:]:
        if row.strip().startswith(SHOWN):
            short.append(row)
        elif row and short[-1] != "  ...":
            short.append("  ...")
    return short


def printed(command: str, folder: Path, codes: tuple[int, ...]) -> str:
    """The output of a ``megatron-pp`` command in ``folder``. Ends the program if the exit code is not in ``codes``."""
    arguments = [sys.executable, "-m", "megatron_pp", *shlex.split(command)[1:]]
    theirs = {name: value for name, value in os.environ.items() if name not in _OF_TERMINALS}
    environment = {**theirs, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in codes:
        sys.exit(f"{command}\nended with {done.returncode}: {done.stderr}")
    return done.stdout.rstrip("\n")


def _renewed(page: Path, name: str, language: str, lines: list[str]) -> str:
    """The text of ``page`` with ``lines`` as a block between the marks of ``name``."""
    block = re.sub(r" +\n", "\n", "\n".join([f"\n```{language}", *lines, "```\n"]))
    return MadePart(page, name, lambda: block).renewed(page.read_text(encoding="utf-8"))


MADE = {"check": check_page, "advise": advise_page}

if __name__ == "__main__":
    sys.exit(main())

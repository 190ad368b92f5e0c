"""Parts of pages that a command makes: each stands between two marks, and `--check` reports those that are stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MadePart:
    """``make()`` is the Markdown that belongs between the marks of ``name`` on ``page``."""

    page: Path
    name: str
    make: Callable[[], str]

    def renewed(self, text: str) -> str:
        """``text``, the page's, with this part made anew."""
        before, _, after = self.split(text)
        return f"{before}\n{self.make()}\n{after}"

    def split(self, text: str) -> tuple[str, str, str]:
        """``text``, the page's: up to this part, this part, and behind it, with the marks in the first and the last."""
        start, end = f"<!-- made by a command: {self.name} -->", f"<!-- end of {self.name} -->"
        before, found, rest = text.partition(start)
        part, found_too, after = rest.partition(end)
        if not (found and found_too):
            raise SystemExit(f"{self.page.name} has no place for {self.name}: it needs the lines {start} and {end}")
        return before + start, part, end + after


def renew(parts: Sequence[MadePart], description: str) -> int:
    """Write the parts into their pages; with `--check` in the arguments, only report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a part is stale, change nothing")
    check = parser.parse_args().check
    stale = 0
    for part in parts:
        old = part.page.read_text(encoding="utf-8")
        new = part.renewed(old)
        if check and new != old:
            print(f"{part.page.name}: {part.name} is out of date; run python {sys.argv[0]}", file=sys.stderr)
            stale = 1
        elif new != old:
            part.page.write_text(new, encoding="utf-8")
    return stale


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])

"""Writes the parts of pages that a command makes. Each part is between two marks. `--check` only reports the parts that
are out of date.

Long tables are data files beside the page, ``data/NAME.csv``. The page links to each; the site shows the table there.
"""

from __future__ import annotations

import argparse
import csv
import html
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Table = Sequence[Sequence[str]]  # the first row is the head
_TABLE = re.compile(r"(?:^\|.*(?:\n|\Z))+", re.MULTILINE)
_DATA_LINE = re.compile(r"^\[Table: ([^\]\n]+)\]\((?:\.\./)*(?:docs/)?data/([\w.-]+)\.csv\)$", re.MULTILINE)
_SHORT = 7  # rows, with the head, up to which a table stays on its page


@dataclass(frozen=True)
class MadePart:
    """``make()`` is the Markdown that belongs between the marks of ``name`` on ``page``."""

    page: Path
    name: str
    make: Callable[[], str]

    def renewed(self, text: str) -> str:
        """``text`` of the page, with this part written again."""
        before, _, after = self.split(text)
        return f"{before}\n{self.make()}\n{after}"

    def split(self, text: str) -> tuple[str, str, str]:
        """``text`` of the page in three: before this part with its first mark, this part, and after it with its last
        mark."""
        start, end = f"<!-- made by a command: {self.name} -->", f"<!-- end of {self.name} -->"
        before, found, rest = text.partition(start)
        part, found_too, after = rest.partition(end)
        if not (found and found_too):
            raise SystemExit(f"{self.page.name} has no place for {self.name}: it needs the lines {start} and {end}")
        return before + start, part, end + after


@dataclass(frozen=True)
class MadeData:
    """A data file that holds the table ``make()``."""

    page: Path
    make: Callable[[], Table]
    name: str = "the table"

    def renewed(self, text: str) -> str:
        """The content of the file. ``text``, its old content, does not matter."""
        return _csv_text(self.make())


def renew(parts: Sequence[MadePart | MadeData], description: str) -> int:
    """Write the parts into their files; with `--check` in the arguments, only report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a part is out of date")
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


def markdown_table(rows: Table) -> str:
    """``rows`` as a Markdown table. The first row is the head."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])


def table_in(text: str) -> list[list[str]]:
    """The rows of the first Markdown table in ``text``; empty if there is none."""
    lines = _TABLE.search(text)
    if lines is None:
        return []
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return [head, *body]


def data_file(page: Path, name: str) -> Path:
    return page.parent / "data" / f"{name}.csv"


def write_data(page: Path, name: str, title: str, rows: Table) -> str:
    """Write the table into its data file. Returns the line of the page that links to it."""
    file = data_file(page, name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(_csv_text(rows), encoding="utf-8")
    return f"[Table: {title}](data/{name}.csv)"


def _csv_text(rows: Table) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([html.unescape(cell) for cell in row] for row in rows)
    return out.getvalue()


def read_data(page: Path, name: str) -> list[list[str]]:
    """The table in a data file, its cells as Markdown."""
    with data_file(page, name).open(encoding="utf-8", newline="") as lines:
        return [[cell.replace("|", "&#124;") for cell in row] for row in csv.reader(lines)]


def long_tables_to_data(page: Path, prefix: str, title: str, text: str) -> str:
    """``text`` of a page, with its long tables moved to data files PREFIX_HEADING.csv or PREFIX_TITLE.csv and links
    instead."""

    def moved(match: re.Match[str]) -> str:
        rows = table_in(match[0])
        if len(rows) <= _SHORT:
            return match[0]
        headings = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)
        name = headings[-1] if headings else title
        file = re.sub(r"\W+", "_", f"{prefix} {name}".lower())
        return write_data(page, file, name, rows) + "\n" * match[0].endswith("\n")

    return _TABLE.sub(moved, text)


def with_tables(page: Path, text: str, around: str = "{table}") -> str:
    """``text`` of a page, with tables in place of the lines that link to them. ``around`` is a format of title and
    table."""
    return _DATA_LINE.sub(
        lambda match: around.format(title=html.escape(match[1]), table=markdown_table(read_data(page, match[2]))), text
    )

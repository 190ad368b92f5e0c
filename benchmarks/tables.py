"""Put the tables of a folder of results into docs/performance.md, each between its two marks."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from benchmarks.report import BenchmarkError, Report, Row

HELP = "refresh the tables of docs/performance.md from the JSON that the other subcommands wrote"
QUICK: dict[str, object] = {}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        required=True,
        help="folders that --out named; what several hold of one benchmark becomes one table, in this order",
    )
    parser.add_argument("--page", type=Path, default=PAGE)


def run(args: argparse.Namespace) -> None:
    reports: dict[str, Report] = {}
    for source in args.sources:
        found = sorted(source.glob("*.json"))
        if not found:
            raise BenchmarkError(f"{source} holds no .json; run a subcommand with --out {source} first")
        for report in map(Report.read, found):
            earlier = reports.get(report.name)
            reports[report.name] = report if earlier is None else together(earlier, report)
    text = args.page.read_text()
    for report in reports.values():
        text = with_table(text, report)
        print(f"{args.page}: {report.name}")
    args.page.write_text(text)


def together(one: Report, other: Report) -> Report:
    """The rows of both; settings and environment of both where they differ. Raises BenchmarkError
    for tables of other columns."""
    if one.columns != other.columns:
        raise BenchmarkError(f"two reports {one.name!r} have other columns: they were not made by one version")
    return replace(
        one,
        rows=one.rows + other.rows,
        settings=_of_both(one.settings, other.settings),
        machine=_of_both(one.machine, other.machine),
    )


def _of_both(one: Row, other: Row) -> Row:
    both = {**one, **other}
    return {name: value if one.get(name) == value else f"{one.get(name)} and {value}" for name, value in both.items()}


def with_table(text: str, report: Report) -> str:
    """``text`` with what stands between the report's marks replaced by its table. Raises BenchmarkError."""
    start, end = f"<!-- table {report.name} -->", f"<!-- end {report.name} -->"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise BenchmarkError(f"the page has no marks {start} and {end} to put the table between")
    return pattern.sub(lambda _: f"{start}\n{report.markdown()}\n{end}", text)

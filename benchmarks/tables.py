"""Writes each benchmark of a folder of results into docs/performance.md, between the marks of that benchmark: its
chart, a paragraph (``readings.py``), and a link to its table in docs/data. docs/data/performance_runs.csv has the
settings and versions of each table.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from made_parts import data_file, read_data, write_data

from benchmarks.charts import write_chart
from benchmarks.readings import reading
from benchmarks.report import BenchmarkError, Report, Row

HELP = "write charts, readings and tables of docs/performance.md from the JSON of the other subcommands"
QUICK: dict[str, object] = {}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
RUNS = "performance_runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="sources",
        type=Path,
        nargs="+",
        required=True,
        help="folders that --out named; results of one benchmark in several folders become one table, in this order",
    )
    parser.add_argument("--page", type=Path, default=PAGE)


def run(args: argparse.Namespace) -> int:
    """Write the page, its tables, and its charts in the folder `charts` beside it. Returns 0."""
    reports: dict[str, Report] = {}
    for source in args.sources:
        found = sorted(source.glob("*.json"))
        if not found:
            raise BenchmarkError(f"{source} holds no .json; run a subcommand with --out {source} first")
        for report in map(Report.read, found):
            earlier = reports.get(report.name)
            reports[report.name] = report if earlier is None else together(earlier, report)
    text = args.page.read_text()
    runs = {row[0]: row for row in read_data(args.page, RUNS)[1:]} if data_file(args.page, RUNS).exists() else {}
    for report in reports.values():
        chart = write_chart(report, args.page.parent / "charts")
        text = with_table(text, args.page, report, chart)
        runs[report.name] = [report.name, report.circumstances(), " ".join(report.notes)]
        print(f"{args.page}: {report.name}{'' if chart is None else f', {chart}'}")
    args.page.write_text(text)
    write_data(args.page, RUNS, "", [["table", "measured with", "what its columns say"], *runs.values()])
    return 0


def together(one: Report, other: Report) -> Report:
    """One report with the rows of both. A setting, or a fact about the machine, that differs has both values. Raises
    BenchmarkError if the columns differ."""
    if one.columns != other.columns:
        raise BenchmarkError(f"two reports {one.name!r} have different columns: they were made by different versions")
    return replace(
        one,
        rows=one.rows + other.rows,
        settings=_of_both(one.settings, other.settings),
        machine=_of_both(one.machine, other.machine),
    )


def _of_both(one: Row, other: Row) -> Row:
    both = {**one, **other}
    return {name: value if one.get(name) == value else f"{one.get(name)} and {value}" for name, value in both.items()}


def with_table(text: str, page: Path, report: Report, chart: Path | None) -> str:
    """``text`` with chart, reading and a link to the table between the report's marks. Writes the table beside the
    page. Raises BenchmarkError if the page has no marks."""
    start, end = f"<!-- table {report.name} -->", f"<!-- end {report.name} -->"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise BenchmarkError(f"the page has no marks {start} and {end} for the table")
    parts = [
        f"![{report.title}]({chart.parent.name}/{chart.name})" if chart is not None else "",
        reading(report),
        write_data(page, f"performance_{report.name}", report.title, report.cells()),
    ]
    block = "\n\n".join(part for part in parts if part)
    return pattern.sub(lambda _: f"{start}\n{block}\n{end}", text)

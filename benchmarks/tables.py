"""Put chart, reading and table of each benchmark in a folder of results into docs/performance.md, between its marks."""

from __future__ import annotations

import argparse
import html
import re
from dataclasses import replace
from pathlib import Path

from benchmarks.charts import write_chart
from benchmarks.readings import reading
from benchmarks.report import BenchmarkError, Report, Row

HELP = "renew charts, readings and tables of docs/performance.md from the JSON that the other subcommands wrote"
QUICK: dict[str, object] = {}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


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


def run(args: argparse.Namespace) -> int:
    """The charts go into the folder `charts` beside the page. Returns 0."""
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
        chart = write_chart(report, args.page.parent / "charts")
        text = with_table(text, report, chart)
        print(f"{args.page}: {report.name}{'' if chart is None else f', {chart}'}")
    args.page.write_text(text)
    return 0


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


def with_table(text: str, report: Report, chart: Path | None) -> str:
    """``text`` with what stands between the report's marks replaced by its chart, its reading, and its table, folded.
    Raises BenchmarkError."""
    start, end = f"<!-- table {report.name} -->", f"<!-- end {report.name} -->"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise BenchmarkError(f"the page has no marks {start} and {end} to put the table between")
    parts = [
        f"![{report.title}]({chart.parent.name}/{chart.name})" if chart is not None else "",
        reading(report),
        f"<details markdown>\n<summary>Table: {html.escape(report.title)}</summary>",
        report.markdown(),
        "</details>",
    ]
    block = "\n\n".join(part for part in parts if part)
    return pattern.sub(lambda _: f"{start}\n{block}\n{end}", text)

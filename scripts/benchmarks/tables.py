"""Put the tables of a folder of results into docs/performance.md, each between its two marks."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.report import BenchmarkError, Report

HELP = "refresh the tables of docs/performance.md from the JSON that the other subcommands wrote"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source", type=Path, required=True, help="folder that --out named")
    parser.add_argument("--page", type=Path, default=PAGE)


def run(args: argparse.Namespace) -> None:
    found = sorted(args.source.glob("*.json"))
    if not found:
        raise BenchmarkError(f"{args.source} holds no .json; run a subcommand with --out {args.source} first")
    text = args.page.read_text()
    for path in found:
        report = Report.read(path)
        text = with_table(text, report)
        print(f"{args.page}: {report.name}")
    args.page.write_text(text)


def with_table(text: str, report: Report) -> str:
    """``text`` with what stands between the report's marks replaced by its table. Raises BenchmarkError."""
    start, end = f"<!-- table {report.name} -->", f"<!-- end {report.name} -->"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise BenchmarkError(f"the page has no marks {start} and {end} to put the table between")
    return pattern.sub(lambda _: f"{start}\n{report.markdown()}\n{end}", text)

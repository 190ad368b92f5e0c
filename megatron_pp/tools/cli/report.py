"""``megatron-pp report``: compares a traced run with its plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pp.plan.costs.files import is_special
from megatron_pp.tools.cli.errors import OK, UsageError
from megatron_pp.tools.cli.options.cost_options import add_run_options
from megatron_pp.tools.cli.terminal import print_line, print_table, write_output
from megatron_pp.tools.trace_report import listed, report_picture, report_sentences, report_tables
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.run import load_run

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "compare a traced run with its plan: bubble, exposed waits by cause, slowest rank, overlap"
EXAMPLES = """examples:
  megatron-pp report traces/
  megatron-pp report traces/ --step 10 -o step10.html
  megatron-pp report traces/ -o steps.json
  megatron-pp report traces/ --run 195a3f00c2b41 --rank 5

record a run with config.trace_dir, or MEGATRON_PP_TRACE_DIR=traces; see docs/cli.md
"""
_OUTPUT = "picture as .html (default FOLDER/report.html) or .png; .json has all recorded steps for "
_OUTPUT += "https://ui.perfetto.dev"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder of the traces")
    add_run_options(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help=_OUTPUT)


def run(args: argparse.Namespace, console: Console) -> int:
    output = args.output or str(Path(args.folder) / "report.html")
    if Path(output).suffix not in (".html", ".png", ".json") and not is_special(output):
        raise UsageError(f"reports are written as .html, .png or .json, not as {output}")
    traced = load_run(args.folder, args.run_name, args.rank or 0)
    found = analyse(traced, args.step)
    plan = found.measured.plan.spec.describe()
    print_line(console, f"run {traced.name}: {plan}; steps recorded: {listed(traced.steps)}")
    for table in report_tables(found):
        print_table(console, *table)
    for line in report_sentences(found):
        print_line(console, line)
    write_output(console, output, report_picture(found, traced, output))
    return OK

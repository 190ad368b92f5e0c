"""``megatron-pp verify``: completeness, deadlock, buffer lifetime and memory of a plan."""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_pp.cli.errors import OK, REFUSED
from megatron_pp.cli.plan_options import add_plan_options, single_plan
from megatron_pp.cli.terminal import print_line
from megatron_pp.errors import PlanError
from megatron_pp.plan.verifier import verify

SUMMARY = "check a plan: completeness, deadlock, buffer lifetime, memory"
EXAMPLES = """examples:
  megatron-pp verify -s interleaved_1f1b -P 8 -V 4 -M 32
  megatron-pp verify --import plan.csv
  megatron-pp verify --import plan.json --device one_queue,device_sync

exit codes: 0 accepted, 1 refused (and why), 2 wrong arguments or a file that is not a plan
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser)
    parser.add_argument("--keep-outputs", action="store_true", help="outputs are not deallocated after their send")


def run(args: argparse.Namespace, console: Console) -> int:
    plan = single_plan(args)
    try:
        answer, code = str(verify(plan, deallocate=not args.keep_outputs)), OK
    except PlanError as error:
        answer, code = f"refused: {error}", REFUSED
    print_line(console, f"{plan.spec.describe()}: {answer}")
    return code

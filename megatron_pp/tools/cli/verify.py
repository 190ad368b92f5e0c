"""``megatron-pp verify``: checks completeness, deadlocks, buffer lifetimes and memory of a plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_pp.tools.cli.errors import OK, REFUSED, RefusedError, refusing
from megatron_pp.tools.cli.legend import legend
from megatron_pp.tools.cli.options.plan_options import add_plan_options, single_plan, verdict_of
from megatron_pp.tools.cli.terminal import print_json, print_line

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY = "check a plan: completeness, deadlock, buffer lifetime, memory"
EXAMPLES = """examples:
  megatron-pp verify -s interleaved_1f1b -P 8 -V 4 -M 32
  megatron-pp verify -s mine.csv                         # a schedule file: lowered as a run would
  megatron-pp verify --modules 'vision=0/1; llm=2,3; vision>llm' -M 8
  megatron-pp verify --import plan.csv                   # a plan that is verified unchanged
  megatron-pp verify --import plan.json --device one_queue,device_sync

exit codes: 0 accepted, 1 refused (with the reason), 2 wrong arguments or a file without a plan
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser)
    parser.add_argument("--keep-outputs", action="store_true", help="outputs are not deallocated after their send")
    parser.add_argument("--json", action="store_true", help="print the certificate as JSON, for programs")


def run(args: argparse.Namespace, console: Console) -> int:
    try:
        plan = single_plan(args)
        with refusing(plan.spec.describe()):
            verdict = verdict_of(plan, not args.keep_outputs, args.device)
    except RefusedError as error:
        if args.json:
            print_json(console, {"accepted": False, "refused": str(error)})
        else:
            print_line(console, str(error))
            if console.is_terminal and (explained := legend(str(error))):
                print_line(console, explained)
        return REFUSED
    certificate = verdict.certificate
    if args.json:
        print_json(console, {"accepted": True, **certificate.to_dict()})
    else:
        print_line(console, f"{plan.spec.describe()}: {verdict}")
        print_line(console, str(certificate))
    return OK

"""``megatron-pp plan``: prints a plan, or writes it to a file."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_pp.errors import PlanError
from megatron_pp.plan.io.serialize import FORMATS, JSON, TORCH_CSV, format_plan
from megatron_pp.plan.ir.instruction import COMPUTE_OPS, format_program
from megatron_pp.plan.ir.spec import Plan, checked_device
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.tools.cli.errors import OK, refusing
from megatron_pp.tools.cli.legend import legend
from megatron_pp.tools.cli.options.parser import refuse
from megatron_pp.tools.cli.options.plan_options import (
    PLAN_OPTIONS,
    add_plan_options,
    single_plan,
    skip_sentences,
    verdict_of,
)
from megatron_pp.tools.cli.terminal import print_line, write_output

if TYPE_CHECKING:
    from rich.console import Console

_TEXT = ("text", "txt", "")
SUMMARY = "print a plan, one line per rank, or write it as JSON or PyTorch's CSV"
EXAMPLES = """examples:
  megatron-pp plan -s 1f1b -P 4 -M 8
  megatron-pp plan -s interleaved_1f1b -P 4 -V 2 -M 8 --compute-only
  megatron-pp plan -s zb_v -P 4 -M 8 --format torch-csv -o zbv.csv
  megatron-pp plan --import pytorch_schedule.csv --format json -o plan.json
  megatron-pp plan --list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_options(parser)
    parser.add_argument("--format", choices=("text", *FORMATS), help="default by the ending of -o, otherwise text")
    parser.add_argument("--compute-only", action="store_true", help="text without communication")
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of the terminal")
    parser.add_argument("--list", action="store_true", help="only list the schedules")


def run(args: argparse.Namespace, console: Console) -> int:
    if args.list:
        refuse(args, (*PLAN_OPTIONS, "format", "compute_only", "output"), "does not go with --list")
        for family in SCHEDULES.values():
            print_line(console, f"{family.name:21} {family.summary} ({family.source})", hang=22)
        return OK
    plan = single_plan(args)
    if args.device and plan.spec.device != checked_device(args.device):
        refuse(args, ["device"], f"has no effect on {args.source}, a whole plan; verify and simulate apply it")
    ending = Path(args.output or "").suffix.lstrip(".")
    form = args.format or (TORCH_CSV if ending == "csv" else ending)
    text = _formatted(plan, args, form)
    if args.output:
        write_output(console, args.output, text)
    elif console.is_terminal and form in _TEXT:
        for line in text.splitlines():
            print_line(console, line)
        print_line(console, f"# {legend(text)}")
    else:
        console.file.write(text)
    return OK


def _formatted(plan: Plan, args: argparse.Namespace, form: str) -> str:
    if form in _TEXT:
        return _as_text(plan, args.compute_only)
    refuse(args, ["compute_only"], f"is for text, not {form}")
    if form == JSON:
        with suppress(PlanError):  # a plan that is refused has no certificate
            plan = replace(plan, proof=verdict_of(plan, device=args.device).certificate)
    with refusing(plan.spec.describe()):
        return format_plan(plan, form, certified=True)


def _as_text(plan: Plan, compute_only: bool) -> str:
    lines = [f"# {line}" for line in (plan.spec.describe(), *skip_sentences(plan))]
    for rank, program in enumerate(plan.programs):
        shown = [i for i in program if not compute_only or i.op in COMPUTE_OPS]
        lines.append(f"rank {rank}: {format_program(shown)}")
    return "\n".join(lines) + "\n"

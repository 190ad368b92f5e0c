"""Options that name a traced run, for the commands that read one."""

from __future__ import annotations

import argparse

from megatron_pp.cli.cost_options import COSTS
from megatron_pp.cli.given import refuse
from megatron_pp.cli.plan_options import whole
from megatron_pp.tracing.analysis import Findings, analyse
from megatron_pp.tracing.run import load_run

RUN = ("run_name", "rank", "step")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Which run, pipeline and step."""
    parser.add_argument("--run", dest="run_name", metavar="RUN", help="which run, where the folder holds several")
    parser.add_argument("--rank", type=whole, metavar="N", help="the pipeline of this global rank; default 0")
    parser.add_argument("--step", type=whole, metavar="N", help="one step; default all steps of the last plan")


def add_from_trace_option(parser: argparse.ArgumentParser, help_text: str) -> None:
    """``--from-trace FOLDER``, and what chooses within it."""
    parser.add_argument("--from-trace", metavar="FOLDER", help=help_text)
    add_run_options(parser)


def traced_findings(args: argparse.Namespace) -> Findings | None:
    """What the run that --from-trace names measured; None without that option."""
    if args.from_trace is None:
        refuse(args, RUN, "chooses within the traces that --from-trace names")
        return None
    refuse(args, COSTS, "does not go with --from-trace: costs are as measured there")
    return analyse(load_run(args.from_trace, args.run_name, args.rank or 0), args.step)

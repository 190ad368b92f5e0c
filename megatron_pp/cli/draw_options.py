"""Options of ``draw`` that do not apply to a drawing are refused."""

from __future__ import annotations

import argparse

from megatron_pp.cli.cost_options import COSTS, MODEL
from megatron_pp.cli.given import refuse
from megatron_pp.cli.plan_options import PLAN_OPTIONS
from megatron_pp.cli.trace_options import RUN

_ON_PAPER = ("svg", "png")
_AS_WIDE_AS_THE_READER = ("html", "chrome")


def refuse_unused(args: argparse.Namespace, style: str) -> None:
    """Raises UsageError for an option that would change nothing."""
    if style == "grid":
        refuse(args, ("from_trace", *RUN), "is for drawings in time, not for --style grid")
    if args.from_trace is not None:
        refuse(args, (*PLAN_OPTIONS, *COSTS, *MODEL), "does not go with --from-trace, which draws what happened")
    if style not in _ON_PAPER:
        refuse(args, ["dark"], f"is for {' and '.join(_ON_PAPER)}, not {style}")
    if style in _AS_WIDE_AS_THE_READER:
        refuse(args, ["width"], f"is not for {style}, which is as wide as its reader")

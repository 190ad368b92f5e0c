"""The table of ``simulate --memory``: all memory of each rank's GPU. And the options of ``simulate`` and ``advise`` for
memory that torch does not allocate, and for outputs that are not deallocated."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_pp.plan.costs.communicators import CONTEXT, MEASURED_MORE, Outside
from megatron_pp.plan.costs.transports import MAX_CTAS
from megatron_pp.tools.cli.legend import legend
from megatron_pp.tools.cli.options.cost_options import number
from megatron_pp.tools.cli.options.parser import refuse
from megatron_pp.tools.cli.options.plan_options import count
from megatron_pp.tools.cli.terminal import print_line, print_table
from megatron_pp.tools.draw.facts import size_label

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_pp.plan.simulate.device_memory import DeviceMemory

OPTIONS = ("max_ctas", "context_mb")
_COLUMNS = ("parameters", "activations", "outputs", "messages", "kept back", "whole stages", "communicators", "context")


def add_outside_options(parser: argparse._ActionsContainer) -> None:
    limit = "most NCCL channels in a communicator: p2p_max_ctas, and max_ctas of the pipeline group; default "
    limit += f"{MAX_CTAS} for one-way channels, and NCCL's 32 for the group"
    parser.add_argument("--max-ctas", type=count, metavar="N", help=limit)
    context = f"memory of a CUDA context; default {CONTEXT / 1e6:.0f}, that of an H100"
    parser.add_argument("--context-mb", type=number, metavar="MB", help=context)
    kept = "outputs stay after their send: they are not deallocated, or a stage saves them for its backward"
    parser.add_argument("--keep-outputs", action="store_true", help=kept)


def outside_of(args: argparse.Namespace, gloo: bool) -> Outside | None:
    """The memory that torch does not allocate; None on gloo, which takes no memory of a GPU."""
    if gloo:
        refuse(args, OPTIONS, "is for GPUs, but transfers are on gloo here")
        return None
    return Outside(CONTEXT if args.context_mb is None else args.context_mb * 1e6, args.max_ctas)


def show_memory(found: Sequence[DeviceMemory], console: Console) -> None:
    """Prints the table. Columns that have only zeros are left out."""
    numbers = [[one.parameters, *one.allocated, one.of_communicators, one.context] for one in found]
    shown = [k for k in range(len(_COLUMNS)) if any(row[k] for row in numbers)]
    names = ["rank", *(_COLUMNS[k] for k in shown), "together", "at"]
    rows = []
    for rank, (one, row) in enumerate(zip(found, numbers, strict=True)):
        rows.append([str(rank), *(size_label(row[k]) for k in shown), size_label(one.total), one.at])
    if any(one.host for one in found):
        names += ["on host", "pinned at most"]
        rows = [[*row, *map(size_label, (one.host, one.pinned))] for row, one in zip(rows, found, strict=True)]
    print_table(console, "Peak memory of each rank's GPU", names, rows)
    if console.is_terminal and (explained := legend(" ".join(one.at for one in found))):
        print_line(console, explained)
    if any(one.outside_at_most for one in found):
        most = max(found, key=lambda one: one.outside_at_most)
        known = size_label(most.of_communicators + most.context)
        more = size_label(MEASURED_MORE)
        print_line(
            console,
            f"Communicators and context, at most {known} on a rank, are estimated for NVLink. Only one process was "
            f"measured, on an H200 over sockets: it took {more} more, {size_label(most.outside_at_most)}.",
        )
    kinds = list(dict.fromkeys((one.kind, one.channels) for rank in found for one in rank.communicators))
    rows = [[kind, str(channels), *_of_kind(found, kind)] for kind, channels in kinds]
    names = ["communicators", "NCCL channels in each", "of a rank", "receiving ends", "sending ends", "together"]
    print_table(console, "Communicators", names, rows)


def _of_kind(found: Sequence[DeviceMemory], kind: str) -> list[str]:
    """A row of the table of communicators. Numbers that differ between ranks are written as ``2 to 4``."""
    made = [one for rank in found for one in rank.communicators if one.kind == kind]
    numbers = [[getattr(one, field) for one in made] for field in ("count", "receiving", "sending", "nbytes")]
    labels: Sequence[Callable[[Any], str]] = (str, str, str, size_label)
    least_and_most = [dict.fromkeys((min(each), max(each))) for each in numbers]
    return [" to ".join(map(label, each)) for label, each in zip(labels, least_and_most, strict=True)]


def memory_facts(one: DeviceMemory) -> dict[str, Any]:
    made = [{**asdict(of_kind), "bytes": of_kind.nbytes} for of_kind in one.communicators]
    return {
        "parameters": one.parameters,
        **one.allocated._asdict(),
        "communicators": one.of_communicators,
        "context": one.context,
        "outside_at_most": one.outside_at_most,
        "total": one.total,
        "at": one.at,
        "host": one.host,
        "host_pinned_at_most": one.pinned,
        "communicators_made": made,
    }

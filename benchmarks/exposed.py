"""Step time on a slow link, over a bound: a simulated step whose transfers overlap compute as far as possible."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.engines import ENGINES, available_steps, surroundings
from benchmarks.megatron_library import versions
from benchmarks.rank_processes import run_on_shaped_network, transfer_seconds
from benchmarks.report import Report, Row, add_options
from benchmarks.rounds import beside_bound, print_progress, slowest_rank, timed_rounds
from benchmarks.sweep import CHUNKS, Sweep, bound_seconds, sweep_settings, work_of
from benchmarks.sweep import add_arguments as add_sweep_arguments
from benchmarks.work import Work

HELP = "communication left exposed on a slow link, as transfers grow from 0.05 to 1.5 of a forward (needs root)"
RATIOS = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5)
QUICK = {"ratios": [0.1, 0.5, 1.0], "rounds": 1, "forward_ms": 35.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sweep_arguments(parser, schedules=list(CHUNKS), microbatches=8, forward_ms=50.0, rate_mbit=400.0, timeout=900.0)
    add_options(parser, ratios=(list(RATIOS), "transfer over forward"))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))


def run(args: argparse.Namespace) -> Report:
    sweep = Sweep.of(args)
    rows: list[Row] = []
    for size in args.pp:
        works = [
            (ratio, work_of(schedule, size, args.microbatches, sweep.message_bytes(ratio)))
            for schedule in args.schedules
            for ratio in args.ratios
        ]
        per_rank = run_on_shaped_network(
            _rank, size, (works, sweep, args.engines), args.rate_mbit, args.timeout, peers=True
        )
        for place, (ratio, work) in enumerate(works):
            rows += _rows(ratio, work, sweep, [rank[place] for rank in per_rank])
    return Report(
        "exposed",
        "Step time over the bound with full overlap, on a shaped link",
        rows,
        sweep_settings(args) | versions(),
        [
            "Bound: the simulated step with the same order of compute, receives posted early and sends waited for "
            "late. A transfer takes the time that was measured on the idle link. Over bound: the median step over the "
            "bound.",
            "Targets of ours: at most 1.05 up to 1.0 transfer / F (1.03 up to 0.25), and never above a peer.",
            "Megatron-core has no overlap in 1F1B, so its plain schedule is shown. Only our engine has eager 1F1B.",
        ],
    )


def _rank(
    rank: int, size: int, works: list[tuple[float, Work]], sweep: Sweep, engines: list[str]
) -> list[dict[str, Any]]:
    """For each work: the time of one transfer, and the seconds of each engine's steps."""
    import torch.distributed as dist

    results = []
    for ratio, work in works:
        transfer = transfer_seconds(rank, work.message_bytes)
        steps, _ = available_steps(work, rank, dist.group.WORLD, sweep.stage, engines=engines)
        seconds = timed_rounds(steps, sweep.rounds, 1, dist.barrier, around=surroundings)
        results.append({"transfer": transfer, "seconds": seconds})
        print_progress(rank, len(results), len(works), f"{work.label()}, transfer / F {ratio:g}", seconds)
    return results


def _rows(ratio: float, work: Work, sweep: Sweep, per_rank: list[dict[str, Any]]) -> list[Row]:
    transfer = per_rank[0]["transfer"]
    bound = bound_seconds(work, sweep, transfer)
    rows: list[Row] = []
    for engine, seconds in slowest_rank([rank["seconds"] for rank in per_rank]).items():
        rows.append(
            {
                "P": work.pipeline_size,
                "schedule": work.schedule,
                "transfer / F": ratio,
                "measured transfer / F": transfer / sweep.forward,
                "engine": engine,
                "bound ms": bound * 1e3,
                **beside_bound(seconds, bound),
            }
        )
    return rows

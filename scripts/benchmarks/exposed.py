"""Step time on a slow link, over the bound of a simulation in which transfers overlap compute as far as they can."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.engines import ENGINES, Unavailable, Work, make_step
from benchmarks.network_ranks import run_on_shaped_network, transfer_seconds
from benchmarks.report import Plot, Report, Row
from benchmarks.rounds import slowest_rank, summary, tell_progress, timed_rounds
from benchmarks.stages import TimedStage
from megatron_pp.plan.build import build_plan
from megatron_pp.plan.costs import Link, Network, StageCosts
from megatron_pp.plan.simulate import simulate
from megatron_pp.plan.spec import OVERLAP, PlanSpec

HELP = "communication left exposed on a slow link, as transfers grow from 0.05 to 1.5 of a forward (needs root)"
RATIOS = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5)
SCHEDULES = {"1f1b": 1, "eager_1f1b": 1, "interleaved_1f1b": 2}
COLUMNS = (
    *("P", "schedule", "transfer / F", "measured transfer / F", "engine"),
    *("bound ms", "ms (min)", "ms (median)", "over bound"),
)
_FLOATS = 1024  # hidden size; the sequence length sets the size of a message


@dataclass(frozen=True)
class Sweep:
    """Seconds of a forward and a backward of one chunk, the link's rate, and how often everything is run."""

    forward: float
    backward: float
    rate_mbit: float
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, nargs="+", default=[2], help="pipeline sizes (default 2)")
    parser.add_argument("--ratios", type=float, nargs="+", default=list(RATIOS), help="transfer over forward")
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=50.0, help="of one chunk; a backward takes twice as long")
    parser.add_argument("--rate-mbit", type=float, default=400.0, help="of each direction of each link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each pipeline size")


def run(args: argparse.Namespace) -> Report:
    sweep = Sweep(args.forward_ms / 1e3, 2 * args.forward_ms / 1e3, args.rate_mbit, args.rounds)
    rows: list[Row] = []
    for size in args.pp:
        works = [
            (ratio, _work(schedule, size, args.microbatches, ratio, sweep))
            for schedule in args.schedules
            for ratio in args.ratios
        ]
        per_rank = run_on_shaped_network(_rank, size, (works, sweep, args.engines), args.rate_mbit, args.timeout)
        for place, (ratio, work) in enumerate(works):
            rows += _rows(ratio, work, sweep, [rank[place] for rank in per_rank])
    return Report(
        "exposed",
        "Step time over the bound with full overlap, on a shaped link",
        list(COLUMNS),
        rows,
        {
            "forward ms": args.forward_ms,
            "backward ms": 2 * args.forward_ms,
            "microbatches": args.microbatches,
            "link Mbit/s": args.rate_mbit,
            "rounds": args.rounds,
        },
        [
            "Bound: the discrete-event simulator on the same order of compute with receives posted early and sends "
            "waited late, the transfers as long as measured on the idle link; over bound is taken of the medians.",
            "Wanted of ours: at most 1.05 up to 1.0 transfer / F (1.03 up to 0.25), and never above a peer.",
            "megatron under 1F1B is its plain schedule: it has no overlap there. Eager 1F1B is ours alone.",
        ],
        Plot("transfer / F", "over bound", ("engine",), ("P", "schedule"), target=1.05),
    )


def _work(schedule: str, size: int, microbatches: int, ratio: float, sweep: Sweep) -> Work:
    """Messages as long as ``ratio`` forwards at the link's nominal rate."""
    message = ratio * sweep.forward * sweep.rate_mbit * 1e6 / 8
    rows = max(1, round(message / (4 * _FLOATS)))
    return Work(schedule, size, SCHEDULES[schedule], microbatches, (rows, 1, _FLOATS))


def _rank(
    rank: int, size: int, works: list[tuple[float, Work]], sweep: Sweep, engines: list[str]
) -> list[dict[str, Any]]:
    """For each work: the transfer's own time, and seconds of each engine."""
    import torch.distributed as dist

    results = []
    stage = functools.partial(_timed_stage, sweep)
    for ratio, work in works:
        transfer = transfer_seconds(rank, work.message_bytes)
        steps = {}
        for engine in engines:
            theirs = replace(work, policy="plain") if engine == "megatron" and work.num_chunks == 1 else work
            try:
                steps[engine] = make_step(engine, theirs, rank, dist.group.WORLD, stage)
            except Unavailable:
                continue
        seconds = timed_rounds(steps, sweep.rounds, 1, dist.barrier)
        results.append({"transfer": transfer, "seconds": seconds})
        tell_progress(rank, len(results), len(works), f"{work.label()}, transfer / F {ratio:g}", seconds)
    return results


def _timed_stage(sweep: Sweep, stage: int) -> TimedStage:
    return TimedStage(sweep.forward, sweep.backward)


def _rows(ratio: float, work: Work, sweep: Sweep, per_rank: list[dict[str, Any]]) -> list[Row]:
    transfer = per_rank[0]["transfer"]
    bound = bound_seconds(work, sweep, transfer)
    rows: list[Row] = []
    for engine, seconds in slowest_rank([rank["seconds"] for rank in per_rank]).items():
        times = summary(seconds, 1e3)
        rows.append(
            {
                "P": work.pipeline_size,
                "schedule": work.schedule,
                "transfer / F": ratio,
                "measured transfer / F": transfer / sweep.forward,
                "engine": engine,
                "bound ms": bound * 1e3,
                "ms (min)": times["min"],
                "ms (median)": times["median"],
                "over bound": times["median"] / (bound * 1e3),
            }
        )
    return rows


def bound_seconds(work: Work, sweep: Sweep, transfer: float) -> float:
    """The shortest step that the order of compute allows, over all lookaheads: sends are waited as late as can be."""
    costs = StageCosts.uniform(work.num_stages, sweep.forward, sweep.backward, 0.0)
    network = Network(work.message_bytes, link=Link(bandwidth=work.message_bytes / transfer))
    late = 2 * work.virtual_microbatches

    def step(lookahead: int) -> float:
        sizes = (work.schedule, work.pipeline_size, work.num_chunks, work.num_microbatches)
        spec = PlanSpec(*sizes, policy=OVERLAP, release_after=late, lookahead=lookahead)
        return simulate(build_plan(spec), costs, network).makespan

    return min(step(lookahead) for lookahead in (1, 2, 4, 8))

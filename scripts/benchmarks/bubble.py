"""The bubble of every schedule: measured with compute of known length on gloo, and as the simulator has it."""

from __future__ import annotations

import argparse
import functools

from benchmarks.engines import Unavailable, Work, make_step
from benchmarks.report import Report, Row
from benchmarks.rounds import slowest_rank, summary, timed_rounds
from benchmarks.stages import TimedStage
from megatron_pp.plan.build import build_plan
from megatron_pp.plan.costs import StageCosts
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate import simulate
from megatron_pp.plan.spec import PlanSpec

HELP = "the bubble of each schedule, measured with sleeping compute, beside theory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=20.0, help="of a rank's whole forward; backward twice that")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240.0)


def run(args: argparse.Namespace) -> Report:
    from megatron_pp.testing.processes import run_processes

    works = [
        Work(name, args.pp, _chunks(name), args.microbatches, (1, 1, 8))
        for name, family in SCHEDULES.items()
        if family.search is None
    ]
    per_rank = run_processes(_rank, args.pp, (works, args.forward_ms / 1e3, args.rounds), timeout=args.timeout)
    seconds = slowest_rank([rank[0] for rank in per_rank])
    rows = [
        _row(work, args.forward_ms, seconds.get(work.schedule), per_rank[0][1].get(work.schedule)) for work in works
    ]
    return Report(
        "bubble",
        "Share of all ranks' time that no compute fills",
        ["schedule", "V", "theory", "measured", "measured - theory", "step ms (median)", "remark"],
        rows,
        {"P": args.pp, "microbatches": args.microbatches, "forward ms": args.forward_ms, "rounds": args.rounds},
        [
            "Theory: the simulator, transfers free. For 1F1B it is (P-1)/(M+P-1), for interleaved (P-1)/(V M + P-1). "
            "Messages are 32 bytes; what is above theory is the engine, gloo and the two cores' scheduler."
        ],
    )


def _chunks(name: str) -> int:
    fixed = SCHEDULES[name].chunks
    if fixed is not None:
        return fixed
    return 1 if name == "gpipe" else 2


def _rank(
    rank: int, size: int, works: list[Work], forward: float, rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    import torch.distributed as dist

    steps, reasons = {}, {}
    for work in works:
        seconds = forward / work.num_chunks
        try:
            steps[work.schedule] = make_step("ours", work, rank, dist.group.WORLD, functools.partial(_stage, seconds))
        except Unavailable as reason:
            reasons[work.schedule] = str(reason)
    return timed_rounds(steps, rounds, 1, dist.barrier), reasons


def _stage(seconds: float, stage: int) -> TimedStage:
    return TimedStage(seconds, 2 * seconds)


def _row(work: Work, forward_ms: float, seconds: list[float] | None, reason: str | None) -> Row:
    sizes = (work.schedule, work.pipeline_size, work.num_chunks, work.num_microbatches)
    third = forward_ms / work.num_chunks
    theory = simulate(
        build_plan(PlanSpec(*sizes)), StageCosts.uniform(work.num_stages, third, third, third)
    ).bubble_share
    row: Row = {"schedule": work.schedule, "V": work.num_chunks, "theory": theory, "remark": reason or ""}
    if seconds is not None:
        step = summary(seconds, 1e3)["median"]
        measured = 1 - 3 * forward_ms * work.num_microbatches / step
        row |= {"measured": measured, "measured - theory": measured - theory, "step ms (median)": step}
    return row

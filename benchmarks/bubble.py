"""The bubble of every schedule: measured with compute of known length on gloo, and as the simulator has it."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass

import torch

from benchmarks.engines import Unavailable, Work, make_step
from benchmarks.rank_processes import run_ranks
from benchmarks.report import Report, Row
from benchmarks.rounds import slowest_rank, summary, timed_rounds
from benchmarks.stages import SplitTimedStage, TimedStage
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs import StageCosts
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.spec import PlanSpec
from megatron_pp.testing.toy import TOY_SCHEDULES

HELP = "the bubble of each schedule, measured with sleeping compute, beside the simulator's"
QUICK = {"rounds": 1}


@dataclass(frozen=True)
class Lengths:
    """Seconds of a rank's whole forward, input gradients and weight gradients of one microbatch."""

    forward: float
    input: float
    weight: float

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight

    def of_chunk(self, num_chunks: int) -> Lengths:
        return Lengths(self.forward / num_chunks, self.input / num_chunks, self.weight / num_chunks)


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """The step, and ``Lengths`` in milliseconds."""
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=80.0, help="of a rank's whole forward")
    parser.add_argument("--backward-ms", type=float, default=90.0, help="of its input gradients")
    parser.add_argument("--weight-ms", type=float, default=70.0, help="of its weight gradients")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_arguments(parser)
    parser.add_argument("--schedules", nargs="+", choices=list(TOY_SCHEDULES), default=list(TOY_SCHEDULES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=280.0)


def run(args: argparse.Namespace) -> Report:
    works = [Work(name, args.pp, _chunks(name), args.microbatches, (1, 1, 8)) for name in args.schedules]
    lengths = Lengths(args.forward_ms / 1e3, args.backward_ms / 1e3, args.weight_ms / 1e3)
    per_rank = run_ranks(_rank, args.pp, (works, lengths, args.rounds), timeout=args.timeout)
    seconds = slowest_rank([rank[0] for rank in per_rank])
    rows = [_row(work, lengths, seconds.get(work.schedule), per_rank[0][1].get(work.schedule)) for work in works]
    return Report(
        "bubble",
        "Share of all ranks' time that no compute fills",
        ["schedule", "V", "simulated", "measured", "measured - simulated", "step ms (median)", "step over simulated"],
        rows,
        {
            "P": args.pp,
            "microbatches": args.microbatches,
            "forward ms": args.forward_ms,
            "backward ms": args.backward_ms,
            "weight ms": args.weight_ms,
            "rounds": args.rounds,
        },
        [
            "Simulated: transfers free. Measured: compute sleeps, gloo on the loopback, messages of 32 bytes; what is "
            "above the simulator is the engine, gloo and the cores' scheduler. Backwards are really split: weight "
            "gradients wait in the store until their W. Wanted: within 0.05."
        ],
    )


def _chunks(name: str) -> int:
    fixed = TOY_SCHEDULES[name].chunks
    if fixed is not None:
        return fixed
    return 1 if name == "auto" else 2


def _rank(
    rank: int, size: int, works: list[Work], lengths: Lengths, rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    import torch.distributed as dist

    steps, reasons = {}, {}
    for work in works:
        split = TOY_SCHEDULES[work.schedule].splits_weight
        make_stage = functools.partial(_stage, lengths.of_chunk(work.num_chunks), split)
        try:
            steps[work.schedule] = make_step("ours", work, rank, dist.group.WORLD, make_stage)
        except Unavailable as reason:
            reasons[work.schedule] = str(reason)
    return timed_rounds(steps, rounds, 1, dist.barrier), reasons


def _stage(lengths: Lengths, split: bool, stage: int) -> torch.nn.Module:
    if split:
        return SplitTimedStage(lengths.forward, lengths.input, lengths.weight)
    return TimedStage(lengths.forward, lengths.input + lengths.weight)


def _row(work: Work, lengths: Lengths, seconds: list[float] | None, reason: str | None) -> Row:
    simulated = simulate(
        build_plan(PlanSpec(work.schedule, work.pipeline_size, work.num_chunks, work.num_microbatches)),
        _costs(work, lengths),
    )
    row: Row = {"schedule": work.schedule, "V": work.num_chunks, "simulated": simulated.bubble_share}
    if seconds is None:
        return row | {"measured": reason or ""}
    step = summary(seconds)["median"]
    measured = 1 - lengths.total * work.num_microbatches / step
    return row | {
        "measured": measured,
        "measured - simulated": measured - simulated.bubble_share,
        "step ms (median)": step * 1e3,
        "step over simulated": step / simulated.makespan,
    }


def _costs(work: Work, lengths: Lengths) -> StageCosts:
    one = lengths.of_chunk(work.num_chunks)
    return StageCosts.uniform(work.num_stages, one.forward, one.input, one.weight)

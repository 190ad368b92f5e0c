"""The bubble of every schedule: measured on gloo with compute of known length, and simulated."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from benchmarks.engines import make_step
from benchmarks.rank_processes import run_ranks
from benchmarks.report import Report, Row, add_options, numbers_of
from benchmarks.rounds import slowest_rank, summary, timed_rounds
from benchmarks.stages import SplitTimedStage, TimedStage
from benchmarks.work import Unavailable, Work
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.testing.toy import TOY_SCHEDULES

HELP = "the bubble of each schedule, measured with sleeping compute, beside the simulator's"
QUICK = {"rounds": 1}


@dataclass(frozen=True)
class Lengths:
    """Seconds of a rank's whole forward, input gradients and weight gradients, for one microbatch."""

    forward: float
    input: float
    weight: float

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight

    @classmethod
    def of(cls, args: argparse.Namespace) -> Lengths:
        return cls(args.forward_ms / 1e3, args.backward_ms / 1e3, args.weight_ms / 1e3)

    def of_chunk(self, num_chunks: int) -> Lengths:
        return Lengths(self.forward / num_chunks, self.input / num_chunks, self.weight / num_chunks)

    def stage(self, split: bool) -> TimedStage:
        """A stage of these lengths. With ``split`` its backward is split."""
        if split:
            return SplitTimedStage(self.forward, self.input, self.weight)
        return TimedStage(self.forward, self.input + self.weight)

    def simulated(self, spec: PlanSpec) -> Simulation:
        """The simulated step, in which transfers take no time."""
        one = self.of_chunk(spec.num_chunks)
        costs = StageCosts.uniform(spec.pipeline_size * spec.num_chunks, one.forward, one.input, one.weight)
        return simulate(build_plan(spec), costs)


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the step, and those of ``Lengths`` in milliseconds."""
    lengths = {
        "forward_ms": (80.0, "milliseconds of a rank's whole forward"),
        "backward_ms": (90.0, "milliseconds of its input gradients"),
    }
    add_options(
        parser, pp=4, microbatches=8, **lengths, weight_ms=(70.0, "milliseconds of its weight gradients"), timeout=280.0
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_arguments(parser)
    add_options(parser, rounds=3)
    parser.add_argument("--schedules", nargs="+", choices=list(TOY_SCHEDULES), default=list(TOY_SCHEDULES))


def run(args: argparse.Namespace) -> Report:
    works = [Work(name, args.pp, _chunks(name), args.microbatches, (1, 1, 8)) for name in args.schedules]
    lengths = Lengths.of(args)
    per_rank = run_ranks(_rank, args.pp, (works, lengths, args.rounds), timeout=args.timeout)
    seconds = slowest_rank([rank[0] for rank in per_rank])
    rows = [_row(work, lengths, seconds.get(work.schedule), per_rank[0][1].get(work.schedule)) for work in works]
    return Report(
        "bubble",
        "Share of all ranks' time that no compute fills",
        rows,
        numbers_of(args),
        [
            "Simulated: transfers take no time. Measured: compute sleeps, gloo on the loopback, messages of 32 bytes. "
            "The difference is due to the engine, gloo and the cores' scheduler. Backwards are really split: weight "
            "gradients wait in the store until their W. Target: within 0.05."
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
        one = lengths.of_chunk(work.num_chunks)
        try:
            steps[work.schedule] = make_step("ours", work, rank, dist.group.WORLD, lambda _, m=one, s=split: m.stage(s))
        except Unavailable as reason:
            reasons[work.schedule] = str(reason)
    return timed_rounds(steps, rounds, 1, dist.barrier), reasons


def _row(work: Work, lengths: Lengths, seconds: list[float] | None, reason: str | None) -> Row:
    simulated = lengths.simulated(work.spec())
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

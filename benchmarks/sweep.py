"""Parts that benchmarks on shaped links share: options, sizes of messages, compute of known length, the bound."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import add_options
from benchmarks.stages import TimedStage
from benchmarks.work import Work
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.spec import OVERLAP, Plan
from megatron_pp.plan.simulate.simulator import simulate

CHUNKS = {"1f1b": 1, "eager_1f1b": 1, "interleaved_1f1b": 2}
"""Measured schedule -> its number of model chunks on a rank."""

_FLOATS = 1024  # hidden size; the sequence length sets the size of a message


@dataclass(frozen=True)
class Sweep:
    """Seconds of a forward and a backward of one chunk, the link's rate, and the number of rounds."""

    forward: float
    backward: float
    rate_mbit: float
    rounds: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Sweep:
        return cls(args.forward_ms / 1e3, 2 * args.forward_ms / 1e3, args.rate_mbit, args.rounds)

    def stage(self, stage: int) -> TimedStage:
        return TimedStage(self.forward, self.backward)

    def costs(self, work: Work, scale: float = 1.0) -> StageCosts:
        return StageCosts.uniform(work.num_stages, self.forward * scale, self.backward * scale, 0.0)

    def message_bytes(self, ratio: float) -> float:
        """The bytes of a message that takes ``ratio`` forwards at the link's nominal rate."""
        return ratio * self.forward * self.rate_mbit * 1e6 / 8


def add_arguments(
    parser: argparse.ArgumentParser, *, schedules: Sequence[str], forward_ms: float, rate_mbit: float, **defaults: Any
) -> None:
    """Add the options with these defaults. ``defaults``: the timeout, and further options such as ``microbatches``."""
    compute = (
        forward_ms,
        f"milliseconds of one chunk's forward; a backward takes twice as long (default {forward_ms:g})",
    )
    rate = rate_mbit, f"Mbit/s of each direction of each link (default {rate_mbit:g})"
    timeout = defaults.pop("timeout"), "seconds for each pipeline size"
    sizes = [2, 4], "pipeline sizes (default 2 4)"
    add_options(parser, pp=sizes, forward_ms=compute, rate_mbit=rate, rounds=3, timeout=timeout, **defaults)
    parser.add_argument("--schedules", nargs="+", choices=list(CHUNKS), default=list(schedules))


def sweep_settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "forward ms": args.forward_ms,
        "backward ms": 2 * args.forward_ms,
        "microbatches": args.microbatches,
        "link Mbit/s": args.rate_mbit,
        "rounds": args.rounds,
    }


def work_of(schedule: str, size: int, microbatches: int, message_bytes: float) -> Work:
    """A step whose messages have about ``message_bytes``."""
    rows = max(1, round(message_bytes / (4 * _FLOATS)))
    return Work(schedule, size, CHUNKS[schedule], microbatches, (rows, 1, _FLOATS))


def bound_seconds(work: Work, sweep: Sweep, transfer: float) -> float:
    """The shortest step that the order of compute allows."""
    return best_step(work, sweep.costs(work), network_of(work, transfer))


def network_of(work: Work, transfer: float) -> Network:
    return Network(work.message_bytes, link=Link(bandwidth=work.message_bytes / transfer))


def best_step(
    work: Work,
    costs: StageCosts,
    network: Network,
    change: Callable[[Plan], Plan] = lambda plan: plan,
    **more: Any,
) -> float:
    """The shortest simulated step over all lookaheads, with sends waited for as late as possible. ``more``: fields of
    the PlanSpec."""
    late = 2 * work.virtual_microbatches

    def step(lookahead: int) -> float:
        spec = work.spec(policy=OVERLAP, release_after=late, lookahead=lookahead, **more)
        return simulate(change(build_plan(spec)), costs, network).makespan

    return min(step(lookahead) for lookahead in (1, 2, 4, 8))

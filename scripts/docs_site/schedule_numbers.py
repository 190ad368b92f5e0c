"""The numbers of every schedule at one size and one cost, from the simulator. The README and the gallery show them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Family
from megatron_pp.plan.simulate.simulator import simulate

RANKS, MICROBATCHES, SLICES = 4, 8, 4
WORK_MS = 12.0
"""Milliseconds of a rank's forward, of its input gradients and of its weight gradients, each for one microbatch."""

OUTPUT_MS = 0.6 * WORK_MS
"""Milliseconds of the whole output layer's forward. Only schedules that split it over all ranks count it."""

_ARXIV = re.compile(r"arXiv (\d{4}\.\d{4,5})")


@dataclass(frozen=True)
class Numbers:
    """The numbers of one schedule. ``steps``: the makespan, in forwards of a rank. ``bubble``: the share of all ranks'
    time without compute. ``peak``: activations of the fullest rank, in microbatches of a rank. ``messages``: the number
    of transfers of all ranks."""

    family: Family
    chunks: int
    steps: float
    bubble: float
    peak: float
    messages: int

    @property
    def papers(self) -> str:
        """Links to the papers that the schedule comes from."""
        found = dict.fromkeys(_ARXIV.findall(self.family.source))
        return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in found)


def chunks_of(family: Family) -> int:
    """Model chunks of a rank: the number that the family needs. 2 for a family that allows several, 1 for auto."""
    return family.chunks or (1 if family.name == "auto" else 2)


def slices_of(family: Family) -> int:
    """Slices of a sequence; 1 for families that do not cut sequences."""
    return SLICES if family.sliced else 1


def output_of(family: Family) -> float:
    """Milliseconds of the output layer's forward, 0 for families that do not split the output layer."""
    return OUTPUT_MS if family.barriers else 0.0


def numbers_of(family: Family) -> Numbers:
    chunks = chunks_of(family)
    slices = slices_of(family)
    plan = build_plan(PlanSpec(family.name, RANKS, chunks, MICROBATCHES, slices=slices))
    one = WORK_MS / chunks
    costs = StageCosts.uniform(plan.placement.num_stages, one, one, one)
    result = simulate(plan, replace(costs, **known_costs(output_layer=(output_of(family),) * 3)))
    return Numbers(
        family,
        chunks,
        steps=result.makespan / WORK_MS,
        bubble=result.bubble_share,
        peak=max(result.peak_in_flight()) / chunks / slices,
        messages=sum(messages for messages, _ in result.volume().values()),
    )


@cache
def all_numbers() -> tuple[Numbers, ...]:
    return tuple(numbers_of(family) for family in SCHEDULES.values())

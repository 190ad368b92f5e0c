"""Steps in a row, in which no rank waits for the others between two steps.

An optimizer that synchronises the ranks of a pipeline (the norm of all gradients, a check for infinities) makes them
begin each step together, and a step takes its makespan. Where that is bypassed (arXiv 2401.10241, section 4), a rank
begins its next step when its own part of the last one is over: the ranks stay shifted against each other, and waits at
the start of a step overlap those at the end. The papers' bubbles of ZB-H2 and ZB-V, whose ranks have no gap within
their own part, count on it; other schedules gain nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_pp.plan.costs.stage_costs import FREE, Network, StageCosts
from megatron_pp.plan.ir.instruction import COMPUTE_OPS, later
from megatron_pp.plan.ir.repeated import Line
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate

_STEPS = (3, 6, 12, 24)  # the second step is steady already unless costs are very unequal
_CLOSE = 1e-9


@dataclass(frozen=True)
class SteadyStep:
    """The time of one of many steps, in the unit of the costs. The optimizer step itself takes no time.

    period  from a rank's start of a step to its start of the next one, on average over the last steps
    busy    compute of one step, per rank
    """

    period: float
    busy: tuple[float, ...]

    @property
    def bubble_share(self) -> float:
        """Share of all ranks' time that no compute fills."""
        whole = self.period * len(self.busy)
        return max(0.0, 1.0 - sum(self.busy) / whole) if whole else 0.0


def steady_step(plan: Plan, costs: StageCosts, network: Network = FREE, device: Collection[str] = ()) -> SteadyStep:
    """Simulates more steps in a row until each rank takes the same time for a step; arguments and errors as of
    ``simulate``.
    """
    for steps in _STEPS:
        each = replace(costs, microbatches=steps * costs.microbatches)
        result = simulate(in_a_row(plan, steps), each, network, device)
        periods = []
        for times in result.ends:
            count = len(times) // steps
            ends = times[count - 1 :: count]  # of each step
            periods += [late - early for early, late in pairwise(ends[steps // 2 - 1 :])]
        if max(periods) - min(periods) <= _CLOSE * result.makespan:
            break
    return SteadyStep(sum(periods) / len(periods), tuple(busy / steps for busy in result.busy))


def in_a_row(plan: Plan, steps: int) -> Plan:
    """``plan`` with that many steps as one: the microbatches of step k are numbered from k M."""
    count = plan.spec.num_microbatches

    def repeated(line: Line) -> Line:
        return tuple(later(at, step * count) for step in range(steps) for at in line)

    programs = tuple(map(repeated, plan.programs))
    orders = tuple(map(repeated, plan.orders))
    return replace(plan, spec=replace(plan.spec, num_microbatches=steps * count), programs=programs, orders=orders)


def longest_span(result: Simulation) -> float:
    """The longest time of a rank from the start of its first operation to the end of its last one."""
    spans = []
    for rank in range(len(result.ends)):
        compute = [event for event in result.events(rank) if event.instruction.op in COMPUTE_OPS]
        spans.append(compute[-1].end - compute[0].start if compute else 0.0)
    return max(spans)


def counts_on_bypass(result: Simulation) -> bool:
    """Whether every rank is at work for less than the makespan, so that steps in a row may take less as well."""
    return longest_span(result) < result.makespan * (1 - _CLOSE)

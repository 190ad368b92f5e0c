"""A recorded run against its plan: what was measured, what the simulator predicts from it, and where they differ."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_pp.errors import ExchangeError
from megatron_pp.plan.costs import Link, Network, StageCosts
from megatron_pp.plan.instruction import BACKWARD, COMPUTE_OPS, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.sim.simulation import Simulation
from megatron_pp.tracing.run import TracedRun


@dataclass(frozen=True)
class Findings:
    """One step, measured and predicted. All times in milliseconds.

    step        the step that is shown: of those of one plan, the one with the median makespan
    steps       how many steps the measured costs are medians over
    measured    as it happened
    predicted   the same plan, simulated with the measured costs
    costs, network   what was measured: per stage, and per link (a transfer takes its link's usual time)
    """

    step: int
    steps: int
    measured: Simulation
    predicted: Simulation
    costs: StageCosts
    network: Network

    @property
    def slowest_rank(self) -> int:
        """The rank that computes longest."""
        return max(range(len(self.measured.busy)), key=lambda r: self.measured.busy[r])

    @property
    def slowest_excess(self) -> float:
        """How much longer than the median rank it computes, as a share of that."""
        usual = statistics.median(self.measured.busy)
        return self.measured.busy[self.slowest_rank] / usual - 1.0 if usual else 0.0

    @property
    def overlap(self) -> float:
        """Share of all transfer time that no rank stood waiting for; 1 where nothing was transferred."""
        total = sum(t.end - t.start for t in self.measured.transfers)
        exposed = sum(w.transfer for w in self.measured.waits)
        return max(0.0, 1.0 - exposed / total) if total else 1.0

    def other(self, rank: int) -> float:
        """Time of ``rank`` between first and last instruction that is neither compute nor a wait: the host's work."""
        starts, ends = self.measured.starts[rank], self.measured.ends[rank]
        if not len(starts):
            return 0.0
        return ends[-1] - starts[0] - self.measured.busy[rank] - self.measured.waits[rank].total


def analyse(run: TracedRun, step: int | None = None) -> Findings:
    """``step`` alone, or all recorded steps that ran the plan of the last one. Raises ExchangeError, PlanError."""
    if step is not None and step not in run.steps:
        known = ", ".join(map(str, run.steps))
        raise ExchangeError(f"step {step} was not recorded by all ranks; recorded steps: {known}")
    chosen = [run.steps[-1] if step is None else step]
    if step is None:
        plan = run.plan(run.steps[-1])
        chosen = [s for s in run.steps if run.plan(s) == plan]
    steps = {s: run.measured(s) for s in chosen}
    shown = sorted(steps, key=lambda s: steps[s].makespan)[(len(steps) - 1) // 2]
    costs = measured_costs(list(steps.values()))
    network = measured_network(list(steps.values()), gloo=run.is_gloo)
    predicted = simulate(steps[shown].plan, costs, network)
    return Findings(shown, len(steps), steps[shown], predicted, costs, network)


def measured_costs(steps: Sequence[Simulation]) -> StageCosts:
    """Median time of each operation of each stage.

    Where backwards ran whole, each half is taken as half of it; where they ran in halves, a whole one as their sum.
    """
    plan = steps[0].plan
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rank in range(len(plan.programs)):
        for i, at in enumerate(plan.timed(rank)):
            if at.op in COMPUTE_OPS:
                times[(at.op, at.stage)] += [step.ends[rank][i] - step.starts[rank][i] for step in steps]

    def median(op: str) -> tuple[float, ...]:
        stages = range(plan.placement.num_stages)
        return tuple(statistics.median(times[(op, s)]) if times[(op, s)] else 0.0 for s in stages)

    halves, weight, whole = median(INPUT_GRAD), median(WEIGHT_GRAD), median(BACKWARD)
    for s, both in enumerate(zip(whole, halves, weight, strict=True)):
        if both[1] == both[2] == 0:
            halves, weight = _with(halves, s, both[0] / 2), _with(weight, s, both[0] / 2)
        elif both[0] == 0:
            whole = _with(whole, s, both[1] + both[2])
    return StageCosts(median(FORWARD), whole, halves, weight)


def _with(values: tuple[float, ...], index: int, value: float) -> tuple[float, ...]:
    return (*values[:index], value, *values[index + 1 :])


def measured_network(steps: Sequence[Simulation], gloo: bool) -> Network:
    """Per link, the median time of its transfers, during which they hold the link; for a link without any, the median
    over all links. ``gloo``: as in Network."""
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        for t in step.transfers:
            times[(t.source, t.target)].append(t.end - t.start)
    size = next((t.size for t in steps[0].transfers if t.size), 1.0)
    usual = {link: statistics.median(taken) for link, taken in times.items()}
    links = {link: _link(size, time) for link, time in usual.items()}
    other = _link(size, statistics.median(usual.values()) if usual else 0.0)
    return Network(size, link=other, links=links, gloo=gloo)


def _link(size: float, time: float) -> Link:
    return Link(bandwidth=size / time) if time > 0 else Link()

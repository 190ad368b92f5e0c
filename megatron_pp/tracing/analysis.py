"""Compares a recorded run with its plan: the measured times, and the step that the simulator predicts from them."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_pp.errors import FileFormatError
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tracing.run import TracedRun

TIMED = (ins.FORWARD, ins.BACKWARD, ins.INPUT_GRAD, ins.WEIGHT_GRAD, *ins.PASSES)
Operation = tuple[str, int]
"""One of TIMED, and a stage."""


class StageTimes:
    """Times of operations, in the unit in which they are added."""

    def __init__(self) -> None:
        self._times: defaultdict[Operation, list[float]] = defaultdict(list)
        self._disturbed: defaultdict[Operation, list[float]] = defaultdict(list)

    def add(
        self,
        program: Sequence[Instruction],
        starts: Sequence[float],
        ends: Sequence[float],
        disturbed: Callable[[Instruction], bool] | None = None,
    ) -> None:
        """One rank's step: when each instruction of ``program`` (``Plan.timed``) began and ended. ``disturbed``
        operations count only if there are no others."""
        for at, start, end in zip(program, starts, ends, strict=True):
            if at.op in TIMED:
                kept = self._disturbed if disturbed is not None and disturbed(at) else self._times
                kept[(at.op, at.stage)].append(end - start)

    def medians(self) -> dict[Operation, float]:
        return {at: statistics.median(times) for at, times in {**self._disturbed, **self._times}.items()}


def stage_costs(medians: Mapping[Operation, float], num_stages: int, slices: int = 1) -> StageCosts:
    """The costs of whole sequences, from median times of one slice of ``slices``; 0 for what did not run.

    Whole backwards count as two equal halves. If backwards ran in halves, a whole one counts as their sum."""

    def of(op: str) -> list[float]:
        return [slices * medians.get((op, stage), 0.0) for stage in range(num_stages)]

    whole = of(ins.BACKWARD)
    halves = of(ins.INPUT_GRAD)
    weight = of(ins.WEIGHT_GRAD)
    for stage, (both, one, other) in enumerate(zip(whole, halves, weight, strict=True)):
        if one == other == 0:
            halves[stage] = weight[stage] = both / 2
        elif both == 0:
            whole[stage] = one + other
    passes = tuple(statistics.mean(of(op)) for op in ins.PASSES)
    costs = StageCosts(tuple(of(ins.FORWARD)), tuple(whole), tuple(halves), tuple(weight))
    return replace(costs, **known_costs(passes=passes))


@dataclass(frozen=True)
class Findings:
    """One step, measured and predicted. All times in milliseconds."""

    step: int  # the step that is shown: the one with the median makespan among the steps of one plan
    steps: int  # how many steps the measured costs are medians over
    measured: Simulation
    predicted: Simulation  # the same plan, simulated with the measured costs
    costs: StageCosts  # measured, per stage
    network: Network  # measured, per link: a transfer takes its link's median time

    @property
    def slowest_rank(self) -> int:
        return max(range(len(self.measured.busy)), key=lambda r: self.measured.busy[r])

    @property
    def slowest_excess(self) -> float:
        """How much longer the slowest rank computes than the median rank, as a share of the median."""
        usual = statistics.median(self.measured.busy)
        return self.measured.busy[self.slowest_rank] / usual - 1.0 if usual else 0.0

    @property
    def overlap(self) -> float:
        """Share of all transfer time that no rank waited for; 1 if nothing was transferred."""
        total = sum(t.end - t.start for t in self.measured.transfers)
        exposed = sum(w.transfer for w in self.measured.waits)
        return max(0.0, 1.0 - exposed / total) if total else 1.0

    def host(self, rank: int) -> float:
        """Time of ``rank`` between its first and last instruction that is neither compute nor a wait: Python and
        posting messages, which the prediction leaves out."""
        starts = self.measured.starts[rank]
        ends = self.measured.ends[rank]
        if not len(starts):
            return 0.0
        return ends[-1] - starts[0] - self.measured.busy[rank] - self.measured.waits[rank].total


def analyse(run: TracedRun, step: int | None = None) -> Findings:
    """The findings of ``step``, or of all recorded steps that ran the plan of the last one. Raises FileFormatError,
    PlanError."""
    if step is not None and step not in run.steps:
        known = ", ".join(map(str, run.steps))
        raise FileFormatError(f"step {step} was not recorded by all ranks; recorded steps: {known}")
    chosen = [step] if step is not None else [s for s in run.steps if run.plan(s) == run.plan(run.steps[-1])]
    steps = {s: run.measured(s) for s in chosen}
    shown = sorted(steps, key=lambda s: steps[s].makespan)[(len(steps) - 1) // 2]
    measured = list(steps.values())
    costs = _measured_costs(measured)
    network = _measured_network(measured, on_cpu=run.ranks[0].header.device == "cpu")
    predicted = simulate(steps[shown].plan, costs, network)
    return Findings(shown, len(steps), steps[shown], predicted, costs, network)


def _measured_costs(steps: Sequence[Simulation]) -> StageCosts:
    """The median time of each operation of each stage. Times of slices are multiplied by the number of slices."""
    plan = steps[0].plan
    times = StageTimes()
    for step in steps:
        for rank in range(len(plan.programs)):
            times.add(plan.timed(rank), step.starts[rank], step.ends[rank])
    return stage_costs(times.medians(), plan.placement.num_stages, plan.spec.num_parts)


def _measured_network(steps: Sequence[Simulation], on_cpu: bool) -> Network:
    """For each link the median time of its transfers; for a link without transfers, the median over all links."""
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        for transfer in step.transfers:
            times[(transfer.source, transfer.target)].append(transfer.end - transfer.start)
    size = next((transfer.size for transfer in steps[0].transfers if transfer.size), 1.0)
    usual = {link: statistics.median(taken) for link, taken in times.items()}

    def link_of(time: float) -> Link:
        return Link(bandwidth=size / time) if time > 0 else Link()

    other = link_of(statistics.median(usual.values()) if usual else 0.0)
    whole = size * steps[0].plan.spec.num_parts
    return Network(whole, link=other, links={link: link_of(time) for link, time in usual.items()}, gloo=on_cpu)

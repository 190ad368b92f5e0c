"""Steps on virtual devices with times, compared with the simulator's times for their plans.

A forward takes one slot. Kinds of operations and messages all take different times. Only a full backward takes longer
than a forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_pp.features.pairs.pair_runner import OverlappedForwardBackward, PairRunner, on_two_streams
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.toy import HIDDEN
from testkit.device_runs.stream_runs import for_nccl, plan_on_streams
from testkit.streams import LATER_STEPS, StreamReport
from testkit.streams.call_log import CallLog
from testkit.streams.virtual_times import Timelines, durations_of, timelines
from testkit.thread_runs.output_layer_runs import BATCH, SEQ, Case, step_on_nccl

SLOT = 1.0
MESSAGE = 0.23  # its last 0.03 are latency
Times = tuple[float, float]  # start and end
_TIMED = ins.SINGLE_COMPUTE_OPS | ins.COPY_POST_OPS


def costs_of(num_stages: int) -> StageCosts:
    return replace(
        StageCosts.uniform(num_stages, SLOT, 0.87, 0.61, 1.53),
        **known_costs(offload=(0.71,) * num_stages, passes=(0.31, 0.37)),
    )


def network_of(nbytes: float) -> Network:
    """The simulator's network. ``nbytes``: bytes of a whole sequence's activation, which takes MESSAGE."""
    return Network(nbytes, link=Link(0.03, nbytes / (MESSAGE - 0.03)))


class PairsBy:
    """Makes engines whose pairs ``function`` runs."""

    def __init__(self, function: OverlappedForwardBackward, executor: Callable[..., PlanExecutor]) -> None:
        self.function = function
        self.executor = executor

    def __call__(self, *args: Any, **more: Any) -> PlanExecutor:
        for feature in more["features"]:
            if isinstance(feature, PairRunner):
                feature.function = self.function
        return self.executor(*args, **more)


@dataclass(frozen=True)
class TimedStep:
    plan: Plan
    report: StreamReport
    lines: Timelines
    simulated: Simulation

    @cached_property
    def spans(self) -> dict[tuple[int, str], Times]:
        """By (rank, instruction): from the start of its first operation to the end of its last one."""
        found: dict[tuple[int, str], Times] = {}
        for one in self.lines.operations:
            if one.within:
                start, end = found.get((one.rank, one.within), (one.start, one.end))
                found[one.rank, one.within] = min(start, one.start), max(end, one.end)
        return found

    @cached_property
    def streams(self) -> dict[tuple[int, str], set[int]]:
        """By (rank, instruction): the streams on which it runs."""
        found: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        for one in self.lines.operations:
            found[one.rank, one.within].add(one.stream)
        return found

    @cached_property
    def expected(self) -> dict[tuple[int, str], Times]:
        """The simulated spans. Each half of a pair has the span of the pair."""
        found: dict[tuple[int, str], Times] = {}
        for rank, program in enumerate(self.plan.programs):
            events = [*self.simulated.events(rank), *self.simulated.copies[rank]]
            times = {str(event.instruction): (event.start, event.end) for event in events}
            for at in program:
                inside = [str(one) for one in ins.operations(at) if one.op in _TIMED]
                for name in inside:
                    found[rank, name] = min(times[n][0] for n in inside), max(times[n][1] for n in inside)
        return found

    @property
    def makespan(self) -> float:
        return max(end for _, end in self.spans.values())

    def computing(self) -> dict[str, float]:
        """By operation, for compute and copies: how much later than simulated it starts or ends, whichever is more."""
        assert self.spans.keys() == self.expected.keys()
        expected = self.expected.items()
        return {f"{name} of rank {rank}": _off(self.spans[rank, name], times) for (rank, name), times in expected}

    def differences(self) -> dict[str, float]:
        """``computing``, with transfers. Transfers of a link are compared in the order of their starts, and of their
        ends."""
        found = self.computing()
        virtual, simulated = (_by_link(one) for one in (self.lines.transfers, self.simulated.transfers))
        assert {link: len(some) for link, some in virtual.items()} == {link: len(s) for link, s in simulated.items()}
        for link, some in virtual.items():
            for number, (one, other) in enumerate(zip(_sorted(some), _sorted(simulated[link]), strict=True)):
                found[f"transfer {number} from and to {link}"] = _off(one, other)
        return found

    def pairs(self) -> list[tuple[int, str, str]]:
        """(rank, forward, backward) of each pair."""
        return [
            (rank, *map(str, ins.operations(at)))  # type: ignore[misc]
            for rank, program in enumerate(self.plan.programs)
            for at in program
            if at.op in ins.JOINED_OPS
        ]


def _off(one: Times, other: Times) -> float:
    return max((a - b for a, b in zip(one, other, strict=True)), key=abs)


def _by_link(transfers: Iterable[Any]) -> dict[tuple[int, int], list[Times]]:
    found: defaultdict[tuple[int, int], list[Times]] = defaultdict(list)
    for one in transfers:
        found[one.source, one.target].append((one.start, one.end))
    return found


def _sorted(times: list[Times]) -> list[Times]:
    starts, ends = (sorted(column) for column in zip(*times, strict=True))
    return list(zip(starts, ends, strict=True))


def timed_step(
    spec: PlanSpec,
    executor: Callable[..., PlanExecutor] = PlanExecutor,
    pairs: OverlappedForwardBackward = on_two_streams,
    **more: Any,
) -> TimedStep:
    """Run a step of ``spec``'s plan by ``executor``, with pairs by ``pairs``. ``more``: options of ``plan_on_streams``.
    Kernels are loaded, because a plan's times are those of later steps."""
    log = CallLog()
    plan = build_plan(spec)
    report = plan_on_streams(spec, PairsBy(pairs, executor), log=log, rules=LATER_STEPS, **more)
    return _timed(plan, report, log, 2 * 1 * HIDDEN)


def timed_output_layer(case: Case) -> TimedStep:
    """Run a step with a split output layer over the transport for NCCL."""
    log = CallLog()
    plan = build_plan(for_nccl(PlanSpec(case.schedule, case.size, 1, case.microbatches)))
    report = step_on_nccl(case, log, overlap_p2p_comm=True, warm_up_p2p=False)[0]
    return _timed(plan, report, log, SEQ * BATCH * HIDDEN)


def _timed(plan: Plan, report: StreamReport, log: CallLog, numbers: int) -> TimedStep:
    """The timed step. ``numbers``: float64 elements of an activation."""
    costs = costs_of(plan.placement.num_stages)
    network = network_of(8.0 * numbers)
    lines = timelines(log.records, durations_of(plan, costs, beside=True), network)
    return TimedStep(plan, report, lines, simulate(plan, costs, network))

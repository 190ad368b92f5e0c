"""Places stays by cost (``fsdp_lowering.py`` says what a stay is). Several placements keep the limit on whole stages.
This module takes the placement with the shortest simulated step. If several steps are equally short, it takes the
placement with the fewest unshards.

The plan without collectives is simulated first. Its times give each rank's stays: a stage is resharded when another one
needs its room, and unsharded as late as possible, so that its all-gather and those behind it are over in time. The ways
differ in the stage that gives up its room: the one whose next use is farthest (Belady's rule, the fewest unshards), or
the farthest of those that are not used for long enough to hide the all-gather.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_pp.feature_table import PER_RUN
from megatron_pp.features.fsdp.fsdp_lowering import Sharded, ShardLayout, Stay, Uses, preset, reductions, uses_of
from megatron_pp.plan.costs.stage_costs import FREE, Network, StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.repeated import Line
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.simulate.simulator import simulate

_NEVER = 1 << 60


class _CollectiveTimes(NamedTuple):
    """Times of one rank without collectives: when each entry of its compute begins, and when the entry before each
    boundary has ended; and the times of each chunk's collectives."""

    starts: Sequence[float]
    ended: Sequence[float]
    gathers: Sequence[float]
    scatters: Sequence[float]


class _Load(NamedTuple):
    """A stay whose unshard may be posted from the boundary ``room`` on."""

    first: int
    last: int
    chunk: int
    room: int


Choose = Callable[[_CollectiveTimes, int, dict[int, int], dict[int, int]], int]


def costs_of(spec: PlanSpec, num_stages: int) -> tuple[StageCosts, Network]:
    """The measured costs of ``spec``. A collective whose time is not known takes as long as its stage's forward."""
    measured = spec.measured
    costs = StageCosts.uniform(num_stages) if measured is None else measured.costs(num_stages)
    network = FREE if measured is None else measured.network()
    unshard = costs.unshard if any(costs.unshard) else costs.forward
    return replace(
        costs, unshard=unshard, reduce_grad=costs.reduce_grad if any(costs.reduce_grad) else unshard
    ), network


def placed_by_cost(plan: Plan, spec: PlanSpec) -> tuple[Line, ...]:
    """The programs of ``plan``, with collectives placed by cost."""
    costs, network = costs_of(spec, plan.placement.num_stages)
    clocks = _clocks(plan, costs, network)
    most = spec.fsdp_max_active_stages or spec.num_chunks
    ways: list[Callable[[int], ShardLayout]] = [
        lambda rank: _layout(plan.programs[rank], clocks[rank], most, _farthest)
    ]
    if most < spec.num_chunks:
        per_run = replace(spec, fsdp_collectives=PER_RUN)
        ways.append(lambda rank: _layout(plan.programs[rank], clocks[rank], most, _hidden))
        ways.append(lambda rank: preset(plan, per_run, rank))
    best: tuple[tuple[float, int], tuple[Line, ...]] | None = None
    for way in ways:
        programs = tuple(Sharded(plan.programs, way))
        step = simulate(replace(plan, spec=spec, programs=programs), costs, network).makespan
        judged = step, sum(at.op in ins.GATHERS for program in programs for at in program)
        if best is None or judged < best[0]:
            best = judged, programs
    assert best is not None
    return best[1]


def _clocks(plan: Plan, costs: StageCosts, network: Network) -> list[_CollectiveTimes]:
    result = simulate(plan, costs, network)
    clocks = []
    for rank, stages in enumerate(plan.placement.stages):
        starts = []
        ended = [0.0]
        events = iter([event for event in result.events(rank) if event.instruction.op in ins.SINGLE_COMPUTE_OPS])
        for at in plan.programs[rank]:
            if at.op in ins.COMPUTE_OPS:
                halves = [next(events) for _ in ins.operations(at)]
                starts.append(halves[0].start)
                ended.append(halves[-1].end)
        gathers, scatters = ([times[stage] for stage in stages] for times in (costs.unshard, costs.reduce_grad))
        clocks.append(_CollectiveTimes(starts, ended, gathers, scatters))
    return clocks


def _layout(program: Line, clock: _CollectiveTimes, most: int, choose: Choose) -> ShardLayout:
    uses = uses_of(program)
    stays = _timed(_loads(uses, clock, most, choose), clock)
    reduces = reductions(program, each=False)
    waits = defaultdict(list)
    free = 0.0
    for boundary in sorted(reduces):
        for chunk in reduces[boundary]:
            free = max(free, clock.ended[boundary]) + clock.scatters[chunk]
            over = next((b for b in range(boundary + 1, len(uses)) if clock.ended[b] >= free), None)
            if over is not None:
                waits[over].append(chunk)
    return ShardLayout(stays, reduces, waits)


def _loads(uses: Uses, clock: _CollectiveTimes, most: int, choose: Choose) -> list[_Load]:
    """The stays of one rank, at most ``most`` at a time."""
    nexts = _next_uses(uses)
    rooms = [0] * most  # boundaries from which on there is room for a stage
    whole: dict[int, _Load] = {}
    lasts: dict[int, int] = {}  # chunk -> the entry that used it last
    done: list[_Load] = []

    def give_way(chunk: int) -> None:
        done.append(whole.pop(chunk)._replace(last=lasts[chunk]))
        rooms.append(lasts[chunk] + 1)

    for i, chunks in enumerate(uses):
        for chunk in sorted(chunks - whole.keys()):
            if not rooms:
                others = {one: nexts[one][i] for one in whole if one not in chunks}
                give_way(choose(clock, i, others, lasts))
            room = rooms.pop(rooms.index(min(rooms)))
            whole[chunk] = _Load(i, i, chunk, max(room, lasts.get(chunk, -1) + 1))
        for chunk in chunks:
            lasts[chunk] = i
        for chunk in [one for one in whole if nexts[one][i] == _NEVER]:
            give_way(chunk)
    return sorted(done)


def _next_uses(uses: Uses) -> dict[int, list[int]]:
    """For each chunk and entry, the next entry behind it that uses the chunk; _NEVER if none does."""
    found = {chunk: [_NEVER] * len(uses) for chunks in uses for chunk in chunks}
    for chunk, line in found.items():
        for i in range(len(uses) - 2, -1, -1):
            line[i] = i + 1 if chunk in uses[i + 1] else line[i + 1]
    return found


def _farthest(clock: _CollectiveTimes, entry: int, others: dict[int, int], lasts: dict[int, int]) -> int:
    """The chunk of ``others`` (chunk -> next use after ``entry``) whose next use is farthest. ``lasts``: last
    uses."""
    return max(others, key=lambda chunk: (others[chunk], -lasts[chunk]))


def _hidden(clock: _CollectiveTimes, entry: int, others: dict[int, int], lasts: dict[int, int]) -> int:
    """The farthest chunk that is unused for long enough to hide the all-gather, or else the one used longest ago."""
    begin = clock.starts[entry] - max(clock.gathers)
    early = {chunk: use for chunk, use in others.items() if clock.ended[lasts[chunk] + 1] <= begin}
    return _farthest(clock, entry, early, lasts) if early else min(others, key=lambda chunk: lasts[chunk])


def _timed(loads: Sequence[_Load], clock: _CollectiveTimes) -> tuple[Stay, ...]:
    """The stays, each with its unshard at the last boundary from which it is whole in time, one after another."""
    stays = []
    free = float("inf")
    latest = _NEVER
    for load in reversed(loads):
        free = min(clock.starts[load.first], free) - clock.gathers[load.chunk]
        wanted = bisect_right(clock.ended, free) - 1
        latest = max(load.room, min(wanted, load.first, latest))
        stays.append(Stay(latest, load.first, load.last, load.chunk))
    return posted_in_order(stays[::-1])


def posted_in_order(stays: Sequence[Stay]) -> tuple[Stay, ...]:
    """The stays with their unshards in the order of use."""
    found = []
    post = 0
    for stay in stays:
        post = max(post, stay.post)
        found.append(stay._replace(post=min(post, stay.first)))
    return tuple(found)

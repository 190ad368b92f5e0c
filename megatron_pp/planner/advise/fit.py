"""How a cut model lies in the memory of its ranks: layers per stage by time and memory, and how many layers of each
stage are recomputed so that the rank keeps to its limit.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.planner.advise.layout import Counts, Units, balanced, improved, is_buildable, stages_of
from megatron_pp.planner.advise.model import MTP, Layer, Model, total
from megatron_pp.planner.advise.timing import Kept

States = Sequence[Sequence[Kept]]  # per rank


@dataclass(frozen=True)
class Room:
    """What a schedule needs of every rank's memory.

    states   what each rank keeps at most, in microbatches (or slices of them) per chunk
    slices   of each sequence
    limit    GB of a rank
    fixed    GB of a rank for pipeline tensors
    """

    placement: Placement
    states: States
    slices: int
    limit: float
    fixed: Sequence[float]

    def kept_in_chunks(self, rank: int, activation: Sequence[float], late: Sequence[float]) -> float:
        """The most that ``rank`` keeps in activations, given those of each of its chunks."""
        each = (
            sum(map(mul, activation, flight)) + sum(map(mul, late, waiting)) for flight, waiting in self.states[rank]
        )
        return max(each, default=0.0) / self.slices

    def kept(self, rank: int, activation: Sequence[float], late: Sequence[float]) -> float:
        """The same, given those of all stages."""
        stages = self.placement.stages[rank]
        return self.kept_in_chunks(rank, [activation[s] for s in stages], [late[s] for s in stages])


@dataclass(frozen=True)
class Fitted:
    """A cut model on its ranks.

    stages       layers of each stage
    recomputed   layers of each stage that are recomputed
    costs        times per stage, with what is recomputed
    activation, late  GB per stage and microbatch
    static, peaks     GB per rank, and with activations and tensors
    """

    stages: tuple[tuple[Layer, ...], ...]
    recomputed: tuple[int, ...]
    costs: StageCosts
    activation: tuple[float, ...]
    late: tuple[float, ...]
    static: tuple[float, ...]
    peaks: tuple[float, ...]


def best_counts(units: Units, room: Room, recompute: bool) -> Counts:
    """Units per stage, for the least work of the busiest rank under the memory limit. Raises PlanError where Megatron
    builds no such stages.
    """
    counts = _fastest(tuple(units), room.placement)
    cuts = _Cuts(units, room, recompute)
    if len(units) == len(counts) or not cuts.is_short(counts):
        return counts
    return improved(counts, cuts.price, cuts.givers, cuts.is_buildable)


@lru_cache(maxsize=64)
def _fastest(units: tuple[tuple[Layer, ...], ...], placement: Placement) -> Counts:
    """Without a memory limit."""
    room = Room(placement, ((),) * placement.pipeline_size, 1, math.inf, (0.0,) * placement.pipeline_size)
    cuts, counts = _Cuts(units, room, False), balanced(units, placement.num_stages)
    if not cuts.is_buildable(counts):
        raise PlanError("Megatron builds no layers for multi-token prediction where this layout has them")
    return counts if len(units) == len(counts) else improved(counts, cuts.price, cuts.givers, cuts.is_buildable)


class _OfRank(NamedTuple):
    """What some layers mean for a rank: GB that it needs but for ``fixed``, nothing recomputed, and that it lacks, with
    all recomputed that has to be; time with and without that.
    """

    need: float
    missing: float
    load: float
    work: float


class _Cuts:
    """Units per stage, and what they mean for the ranks. ``recompute``: whether memory may be had by recomputation."""

    def __init__(self, units: Units, room: Room, recompute: bool) -> None:
        self.units = units
        self.room = room
        self.recompute = recompute
        totals = [total(unit) for unit in units]
        numbers = {one: k for k, one in enumerate(dict.fromkeys(totals))}
        self._known = list(numbers)
        self._has_mtp = any(one.kind == MTP for unit in units for one in unit)
        self._kinds = tuple(numbers[one] for one in totals)  # equal units have one number
        self._found: dict[tuple[int, tuple[tuple[int, ...], ...]], _OfRank] = {}

    def _ranks(self, counts: Counts) -> list[_OfRank]:
        ends = accumulate(counts, initial=0)
        contents = [self._kinds[a:b] for a, b in pairwise(ends)]
        return [self._of(k, tuple(contents[s] for s in row)) for k, row in enumerate(self.room.placement.stages)]

    def _of(self, rank: int, contents: tuple[tuple[int, ...], ...]) -> _OfRank:
        """Of ``rank``, whose stages hold such units: most moves leave most ranks what they had."""
        if (rank, contents) not in self._found:
            self._found[rank, contents] = self._worked_out(rank, [[self._known[k] for k in row] for row in contents])
        return self._found[rank, contents]

    def _worked_out(self, rank: int, rows: Sequence[Sequence[Layer]]) -> _OfRank:
        """Recomputation counts in proportion to the memory that it has to give."""
        room = self.room
        activation, late, recomputed = (
            [sum(one.activation for one in row) for row in rows],
            [sum(one.late for one in row) for row in rows],
            [sum(_least(one) for one in row) for row in rows],
        )
        layers = [one for row in rows for one in row]
        work, static = sum(one.work for one in layers), sum(one.static for one in layers)
        kept, left = room.kept_in_chunks(rank, activation, late), room.limit - room.fixed[rank] - static
        load, over = work, kept - left
        if over > 0 and self.recompute:
            least = room.kept_in_chunks(rank, recomputed, late)
            share = min(1.0, over / (kept - least)) if kept > least else 1.0
            load += share * sum(one.forward for one in layers if one.recomputed is not None)
            over = least - left
        return _OfRank(kept + static, max(0.0, over), load, work)

    def is_buildable(self, counts: Counts) -> bool:
        return not self._has_mtp or is_buildable(stages_of(self.units, counts), self.room.placement)

    def is_short(self, counts: Counts) -> bool:
        """Whether a rank's memory does not do, nothing recomputed."""
        ranks = zip(self._ranks(counts), self.room.fixed, strict=True)
        return any(one.need + fixed > self.room.limit for one, fixed in ranks)

    def givers(self, counts: Counts) -> Iterator[int]:
        """Stages of the rank with the most work, and of that with the least room."""
        ranks, stages = self._ranks(counts), self.room.placement.stages
        work, needs = [one.work for one in ranks], [one.need for one in ranks]
        yield from {*stages[work.index(max(work))], *stages[needs.index(max(needs))]}

    def price(self, counts: Counts) -> tuple[float, ...]:
        """(GB that no rank has, work of the busiest rank, unevenness)."""
        ranks = self._ranks(counts)
        missing, load = sum(one.missing for one in ranks), max(one.load for one in ranks)
        return round(missing, 9), round(load, 9), sum(one.load**2 for one in ranks)


def _least(one: Layer) -> float:
    """GB that it keeps at least."""
    return one.activation if one.recomputed is None else one.recomputed


def fitted(stages: Sequence[tuple[Layer, ...]], room: Room, model: Model, recompute: bool) -> Fitted:
    """The stages with as little recomputed as the memory allows; ``peaks`` may exceed the limit all the same."""
    placement, chosen, peaks = room.placement, [0] * len(stages), []
    costs, activation, late = _stage_costs(stages, chosen, model.attention, model.output)
    static = tuple(sum(one.static for s in row for one in stages[s]) for row in placement.stages)
    for rank, row in enumerate(placement.stages):
        while True:
            peak = static[rank] + room.fixed[rank] + room.kept(rank, activation, late) + _workspace(stages, chosen, row)
            stage = _dearest(stages, chosen, row, room, rank) if recompute and peak > room.limit else None
            if stage is None:
                break
            chosen[stage] += 1
            costs, activation, late = _stage_costs(stages, chosen, model.attention, model.output)
        peaks.append(peak)
    return Fitted(tuple(map(tuple, stages)), tuple(chosen), costs, activation, late, static, tuple(peaks))


def with_recomputed(cut: Fitted, counts: Sequence[int]) -> Fitted:
    """The same stages with so many layers recomputed; the peaks are still those of ``cut``."""
    chosen = tuple(min(count, len(_recomputable(layers))) for count, layers in zip(counts, cut.stages, strict=True))
    costs, activation, late = _stage_costs(cut.stages, chosen, cut.costs.attention)
    return replace(cut, recomputed=chosen, costs=costs, activation=activation, late=late)


def _stage_costs(
    stages: Sequence[Sequence[Layer]], chosen: Sequence[int], attention: float, output: Layer | None = None
) -> tuple[StageCosts, tuple[float, ...], tuple[float, ...]]:
    """Times, activations and late memory of each stage, where the first ``chosen`` layers that can are recomputed."""
    forward, again, weight, kept, late = [], [], [], [], []
    for layers, count in zip(stages, chosen, strict=True):
        sums = total(layers)
        redone = _recomputable(layers)[:count]
        forward.append(sums.forward)
        again.append(sums.backward_input + sum(one.forward for one in redone))
        weight.append(sums.weight)
        kept.append(sums.activation - sum(one.activation - (one.recomputed or 0.0) for one in redone))
        late.append(sums.late)
    backward = tuple(i + w for i, w in zip(again, weight, strict=True))
    costs = StageCosts(tuple(forward), backward, tuple(again), tuple(weight), attention=attention)
    if output is not None:
        costs = replace(costs, output_layer=(output.forward, output.backward_input, output.weight))
    return costs, tuple(kept), tuple(late)


def _recomputable(layers: Sequence[Layer]) -> list[Layer]:
    """Those that can be, the ones that give most memory for their time first; of equals in model order."""
    can = [one for one in layers if one.recomputed is not None and one.activation > one.recomputed]
    return sorted(can, key=lambda one: -(one.activation - (one.recomputed or 0.0)) / (one.forward or 1e-12))


def _workspace(stages: Sequence[Sequence[Layer]], chosen: Sequence[int], row: Sequence[int]) -> float:
    """GB of the layer that is being recomputed."""
    again = (one for s in row for one in _recomputable(stages[s])[: chosen[s]])
    return max((one.activation - (one.recomputed or 0.0) for one in again), default=0.0)


def _dearest(
    stages: Sequence[Sequence[Layer]], chosen: Sequence[int], row: Sequence[int], room: Room, rank: int
) -> int | None:
    """The stage of ``row`` whose next layer gives the most memory for its time; None where there is none left."""
    flight = [max((state[0][c] for state in room.states[rank]), default=0) for c in range(len(row))]
    found = []
    for c, s in enumerate(row):
        left = _recomputable(stages[s])[chosen[s] :]
        if left:
            saved = left[0].activation - (left[0].recomputed or 0.0)
            found.append((flight[c] * saved / (left[0].forward or 1e-12), s))
    return max(found)[1] if found else None

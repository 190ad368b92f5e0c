"""How a cut model lies in the memory of its ranks: layers per stage by time and memory, and how many layers of each
stage are recomputed so that the rank keeps to its limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron_pp.errors import PlanError
from megatron_pp.plan.advise.layout import Counts, Units, balanced, improved, is_buildable, stages_of
from megatron_pp.plan.advise.model import Layer, Model, total
from megatron_pp.plan.advise.timing import Kept
from megatron_pp.plan.costs import StageCosts
from megatron_pp.plan.placement import Placement

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

    def kept(self, rank: int, activation: Sequence[float], late: Sequence[float]) -> float:
        """The most that ``rank`` keeps in activations, given those of each stage."""
        stages = self.placement.stages[rank]
        each = (
            sum(activation[s] * a + late[s] * b for s, a, b in zip(stages, flight, waiting, strict=True))
            for flight, waiting in self.states[rank]
        )
        return max(each, default=0.0) / self.slices


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


class _Cuts:
    """Units per stage, and what they mean for the ranks. ``recompute``: whether memory may be had by recomputation."""

    def __init__(self, units: Units, room: Room, recompute: bool) -> None:
        self.units = units
        self.room = room
        self.recompute = recompute
        totals = [total(unit) for unit in units]
        lists = {name: [getattr(one, name) for one in totals] for name in ("work", "activation", "late", "static")}
        lists["recomputed"] = [one.activation if one.recomputed is None else one.recomputed for one in totals]
        lists["again"] = [0.0 if one.recomputed is None else one.forward for one in totals]
        self._prefix = {name: list(accumulate(values, initial=0.0)) for name, values in lists.items()}

    def _of(self, name: str, counts: Counts) -> list[float]:
        """Sums over the units of each stage, by differences."""
        prefix, ends = self._prefix[name], list(accumulate(counts, initial=0))
        return [prefix[b] - prefix[a] for a, b in pairwise(ends)]

    def is_buildable(self, counts: Counts) -> bool:
        return is_buildable(stages_of(self.units, counts), self.room.placement)

    def _needs(self, counts: Counts) -> list[float]:
        """GB of each rank but for ``fixed``, nothing recomputed."""
        activation, late, static = (self._of(name, counts) for name in ("activation", "late", "static"))
        ranks = enumerate(self.room.placement.stages)
        return [self.room.kept(rank, activation, late) + sum(static[s] for s in stages) for rank, stages in ranks]

    def is_short(self, counts: Counts) -> bool:
        """Whether a rank's memory does not do, nothing recomputed."""
        room = self.room
        return any(need + fixed > room.limit for need, fixed in zip(self._needs(counts), room.fixed, strict=True))

    def givers(self, counts: Counts) -> Iterator[int]:
        """Stages of the rank with the most work, and of that with the least room."""
        work, stages, needs = self._of("work", counts), self.room.placement.stages, self._needs(counts)
        busiest = max(stages, key=lambda row: sum(work[s] for s in row))
        yield from {*busiest, *stages[needs.index(max(needs))]}

    def price(self, counts: Counts) -> tuple[float, ...]:
        """(GB that no rank has, work of the busiest rank, unevenness). Recomputation counts in proportion to the memory
        that it has to give.
        """
        of = {name: self._of(name, counts) for name in self._prefix}
        missing, loads = 0.0, []
        for rank, stages in enumerate(self.room.placement.stages):
            load = sum(of["work"][s] for s in stages)
            left = self.room.limit - self.room.fixed[rank] - sum(of["static"][s] for s in stages)
            over = self.room.kept(rank, of["activation"], of["late"]) - left
            if over > 0 and self.recompute:
                least = self.room.kept(rank, of["recomputed"], of["late"])
                saved = left + over - least
                share = min(1.0, over / saved) if saved > 0 else 1.0
                load += share * sum(of["again"][s] for s in stages)
                over = least - left
            missing += max(0.0, over)
            loads.append(load)
        return round(missing, 9), round(max(loads), 9), sum(load * load for load in loads)


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


def unrecomputed(cut: Fitted) -> Fitted:
    """The same stages with nothing recomputed; the peaks are still those of ``cut``."""
    chosen = (0,) * len(cut.stages)
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

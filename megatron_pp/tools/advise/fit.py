"""Divides a model into stages by time and memory, writes Megatron's text for them, and recomputes as many layers of a
stage as its rank needs to keep to the memory limit.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, product
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.cost_hooks import known_costs
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.planner.timing import Kept
from megatron_pp.tools.advise.model import LETTERS, MTP, PATTERN, Layer, Model, is_hybrid, spreads_mtp, total
from megatron_pp.tools.advise.rounding import rounded

Units = Sequence[tuple[Layer, ...]]
Counts = tuple[int, ...]  # number of units of each stage, in model order
_MOST_MOVES = 60


def balanced(units: Units, num_stages: int) -> Counts:
    """The units per stage, each at least 1, with the least possible work of the most expensive stage."""
    work = [sum(one.work for one in unit) for unit in units]
    low = max(work)
    high = sum(work)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _greedy(work, num_stages, middle) else (middle, high)
    return _greedy(work, num_stages, high) or _greedy(work, num_stages, sum(work)) or ()


def _greedy(work: Sequence[float], num_stages: int, most: float) -> Counts | None:
    """The units per stage if stages are filled from the front up to the work ``most``; None if this needs more
    stages."""
    counts = [0]
    filled = 0.0
    for k, one in enumerate(work):
        left = len(work) - k
        stages_left = num_stages - len(counts)
        if counts[-1] and (filled + one > most * (1 + 1e-12) or left <= stages_left):
            counts.append(0)
            filled = 0.0
        counts[-1] += 1
        filled += one
    return tuple(counts) if len(counts) == num_stages else None


def stages_of(units: Units, counts: Counts) -> list[tuple[Layer, ...]]:
    """The layers of each stage, in model order."""
    ends = list(accumulate(counts, initial=0))
    return [tuple(one for unit in units[a:b] for one in unit) for a, b in pairwise(ends)]


def is_buildable(stages: Sequence[Sequence[Layer]], placement: Placement) -> bool:
    """Whether Megatron builds such stages. MTP layers must be in the last chunk of a rank, not of the first rank; on a
    V they must be on the stage of the loss."""
    if spreads_mtp(one for layers in stages for one in layers):
        return True
    allowed = {row[-1] for row in placement.stages[1:]} if placement.kind == LOOP else set()
    allowed.add(placement.num_stages - 1)
    return all(stage in allowed or all(one.kind != MTP for one in layers) for stage, layers in enumerate(stages))


def layout_text(stages: Sequence[Sequence[Layer]]) -> str:
    """Megatron's ``pipeline_model_parallel_layout``, such as ``Et*3|(t*4|)*6t*3L``. For a hybrid model, the layers of
    its ``--hybrid-layer-pattern``, such as ``M-M*|M-M-``.
    """
    if any(is_hybrid(layers) for layers in stages):
        letters = {kind: letter for letter, kind in PATTERN.items()}
        return "|".join("".join(letters.get(one.kind, "") for one in layers) for layers in stages)
    texts = [_letters("".join(LETTERS[one.kind] for one in layers)) for layers in stages]
    parts = []
    for text, run in groupby(texts[:-1]):
        times = len(list(run))
        parts.append(f"({text}|)*{times}" if times > 1 else f"{text}|")
    return "".join(parts) + texts[-1]


def _letters(text: str) -> str:
    return re.sub(r"(.)\1+", lambda found: f"{found[1]}*{len(found[0])}", text)


States = Sequence[Sequence[Kept]]  # per rank


@dataclass(frozen=True)
class Room:
    """The memory that a schedule needs on each rank.

    states  the activations that each rank keeps at its peaks, in microbatches (or slices of them) per chunk
    slices  number of slices of each sequence
    limit   GB of a rank
    fixed   GB of each rank for pipeline tensors, communicators and context
    """

    placement: Placement
    states: States
    slices: int
    limit: float
    fixed: Sequence[float]

    def kept_in_chunks(self, rank: int, activation: Sequence[float], late: Sequence[float]) -> float:
        """The most GB of activations that ``rank`` keeps, given the activations of each of its chunks."""
        most = 0.0
        for flight, waiting in self.states[rank]:
            kept = sum(gb * count for gb, count in zip(activation, flight, strict=True))
            most = max(most, kept + sum(gb * count for gb, count in zip(late, waiting, strict=True)))
        return most / self.slices

    def kept(self, rank: int, activation: Sequence[float], late: Sequence[float]) -> float:
        """The most GB of activations that ``rank`` keeps, given the activations of all stages."""
        stages = self.placement.stages[rank]
        return self.kept_in_chunks(rank, [activation[s] for s in stages], [late[s] for s in stages])


@dataclass(frozen=True)
class Fitted:
    """A model that is divided into stages.

    stages            layers of each stage
    recomputed        number of recomputed layers of each stage
    costs             times per stage, with recomputation
    activation, late  GB per stage and microbatch
    static, peaks     GB per rank, without and with activations and tensors
    """

    stages: tuple[tuple[Layer, ...], ...]
    recomputed: tuple[int, ...]
    costs: StageCosts
    activation: tuple[float, ...]
    late: tuple[float, ...]
    static: tuple[float, ...]
    peaks: tuple[float, ...]


def best_counts(units: Units, room: Room, recompute: bool) -> Counts:
    """The units per stage with the least work of the busiest rank under the memory limit. Raises PlanError if Megatron
    does not build such stages.
    """
    counts = _fastest(tuple(units), room.placement)
    cuts = _Cuts(units, room, recompute)
    return cuts.improved(counts) if cuts.is_short(counts) else counts


@lru_cache(maxsize=64)
def _fastest(units: tuple[tuple[Layer, ...], ...], placement: Placement) -> Counts:
    """The best units per stage without a memory limit."""
    room = Room(placement, ((),) * placement.pipeline_size, 1, math.inf, (0.0,) * placement.pipeline_size)
    cuts = _Cuts(units, room, False)
    counts = balanced(units, placement.num_stages)
    if not cuts.is_buildable(counts):
        raise PlanError("Megatron does not build layers for multi-token prediction on the stages of this layout")
    return cuts.improved(counts)


class _OfRank(NamedTuple):
    """The memory and time of a rank with some layers.

    need     GB without ``fixed``, if nothing is recomputed
    missing  GB that the rank lacks after the necessary recomputation
    load     time with this recomputation
    work     time without it
    """

    need: float
    missing: float
    load: float
    work: float


class _Cuts:
    """Evaluates numbers of units per stage. ``recompute`` says whether layers may be recomputed."""

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

    def improved(self, counts: Counts) -> Counts:
        """``counts`` after moves of a unit to another stage. Each move is the best one; they end when none lowers the
        price."""
        best = self.price(counts)
        stages = range(len(counts))
        for _ in range(_MOST_MOVES):
            found = [(best, counts)]
            for source, target in product(self.sources(counts), stages):
                moved = tuple(n - (k == source) + (k == target) for k, n in enumerate(counts))
                if source != target and counts[source] > 1 and self.is_buildable(moved):
                    found.append((self.price(moved), moved))
            least, moved = min(found)
            if least >= best:
                break
            best = least
            counts = moved
        return counts

    def _ranks(self, counts: Counts) -> list[_OfRank]:
        ends = accumulate(counts, initial=0)
        contents = [self._kinds[a:b] for a, b in pairwise(ends)]
        return [self._of(k, tuple(contents[s] for s in row)) for k, row in enumerate(self.room.placement.stages)]

    def _of(self, rank: int, contents: tuple[tuple[int, ...], ...]) -> _OfRank:
        """Memory and time of ``rank`` if its stages have these units. Results are kept, because most moves change two
        ranks only."""
        if (rank, contents) not in self._found:
            self._found[rank, contents] = self._worked_out(rank, [[self._known[k] for k in row] for row in contents])
        return self._found[rank, contents]

    def _worked_out(self, rank: int, rows: Sequence[Sequence[Layer]]) -> _OfRank:
        """Calculates memory and time of ``rank``. It recomputes the share of its layers that frees the missing
        memory."""
        room = self.room
        activation = [sum(one.activation for one in row) for row in rows]
        late = [sum(one.late for one in row) for row in rows]
        layers = [one for row in rows for one in row]
        work = sum(one.work for one in layers)
        static = sum(one.static for one in layers)
        kept = room.kept_in_chunks(rank, activation, late)
        left = room.limit - room.fixed[rank] - static
        load = work
        over = kept - left
        if over > 0 and self.recompute:
            least = room.kept_in_chunks(rank, [sum(one.least for one in row) for row in rows], late)
            share = min(1.0, over / (kept - least)) if kept > least else 1.0
            load += share * sum(one.forward for one in layers if one.recomputed is not None)
            over = least - left
        return _OfRank(kept + static, max(0.0, over), load, work)

    def is_buildable(self, counts: Counts) -> bool:
        return not self._has_mtp or is_buildable(stages_of(self.units, counts), self.room.placement)

    def is_short(self, counts: Counts) -> bool:
        """Whether a rank lacks memory if nothing is recomputed."""
        ranks = zip(self._ranks(counts), self.room.fixed, strict=True)
        return any(one.need + fixed > self.room.limit for one, fixed in ranks)

    def sources(self, counts: Counts) -> Iterator[int]:
        """The stages of the rank with the most work, and those of the rank that needs the most memory."""
        ranks = self._ranks(counts)
        stages = self.room.placement.stages
        work = [rounded(one.work) for one in ranks]
        needs = [rounded(one.need) for one in ranks]
        yield from {*stages[work.index(max(work))], *stages[needs.index(max(needs))]}

    def price(self, counts: Counts) -> tuple[float, ...]:
        """The price of ``counts``: (GB that ranks lack, time of the busiest rank, unevenness)."""
        ranks = self._ranks(counts)
        missing = sum(one.missing for one in ranks)
        load = max(one.load for one in ranks)
        return rounded(missing), rounded(load), rounded(sum(one.load**2 for one in ranks))


def fitted(stages: Sequence[tuple[Layer, ...]], room: Room, model: Model, recompute: bool) -> Fitted:
    """The stages with as little recomputation as the memory allows. ``peaks`` may still exceed the limit."""
    placement = room.placement
    chosen = [0] * len(stages)
    peaks = []
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
    """The same stages with ``counts`` recomputed layers. The peaks are still those of ``cut``."""
    chosen = tuple(min(count, len(_recomputable(layers))) for count, layers in zip(counts, cut.stages, strict=True))
    costs, activation, late = _stage_costs(cut.stages, chosen, cut.costs.attention)
    return replace(cut, recomputed=chosen, costs=costs, activation=activation, late=late)


def _stage_costs(
    stages: Sequence[Sequence[Layer]], chosen: Sequence[int], attention: float, output: Layer | None = None
) -> tuple[StageCosts, tuple[float, ...], tuple[float, ...]]:
    """Times, activations and late memory of each stage if its first ``chosen`` recomputable layers are recomputed."""
    forward = []
    again = []
    weight = []
    kept = []
    late = []
    for layers, count in zip(stages, chosen, strict=True):
        sums = total(layers)
        redone = _recomputable(layers)[:count]
        forward.append(sums.forward)
        again.append(sums.backward_input + sum(one.forward for one in redone))
        weight.append(sums.weight)
        kept.append(sums.activation - sum(one.saved for one in redone))
        late.append(sums.late)
    backward = tuple(i + w for i, w in zip(again, weight, strict=True))
    costs = StageCosts(tuple(forward), backward, tuple(again), tuple(weight))
    costs = replace(costs, **known_costs(attention=attention))
    if output is not None:
        times = output.forward, output.backward_input, output.weight
        costs = replace(costs, **known_costs(output_layer=times))
    return costs, tuple(kept), tuple(late)


def _recomputable(layers: Sequence[Layer]) -> list[Layer]:
    """The layers that can be recomputed. Layers that free more memory for their time are first; equal layers are in
    model order."""
    found = (one for one in layers if one.saved > 0)
    return sorted(found, key=lambda one: -rounded(one.saved / (one.forward or 1e-12)))


def _workspace(stages: Sequence[Sequence[Layer]], chosen: Sequence[int], row: Sequence[int]) -> float:
    """The GB of the largest layer that is recomputed: its activations are in memory during its backward."""
    return max((one.saved for s in row for one in _recomputable(stages[s])[: chosen[s]]), default=0.0)


def _dearest(
    stages: Sequence[Sequence[Layer]], chosen: Sequence[int], row: Sequence[int], room: Room, rank: int
) -> int | None:
    """The stage of ``row`` whose next layer frees the most memory for its time; None if no layer is left."""
    found = []
    for chunk, stage in enumerate(row):
        left = _recomputable(stages[stage])[chosen[stage] :]
        if left:
            flight = max((state[0][chunk] for state in room.states[rank]), default=0)
            found.append((rounded(flight * left[0].saved / (left[0].forward or 1e-12)), stage))
    return max(found)[1] if found else None

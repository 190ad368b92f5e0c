"""Families on the V placement made from a repeating pattern (arXiv 2405.15362, sections 3 and 4; arXiv 2401.10241,
section 6).

All have two chunks a rank and a period of 6 slots, the work of one microbatch on one rank: two forwards, two backwards,
two weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_pp.plan.costs import MemoryModel, StageCosts
from megatron_pp.plan.family import Family, Order, Shape
from megatron_pp.plan.instruction import BACKWARD, FORWARD
from megatron_pp.plan.orders.phases import PhaseWriter
from megatron_pp.plan.placement import V_SHAPE, Placement
from megatron_pp.plan.sim.greedy import Pattern, Rules, Scheduled, in_pattern_order, schedule

ZB_V = "zb_v"
V_HALF = "v_half"
V_MIN = "v_min"
ONE_F_ONE_B_V = "1f1b_v"

PERIOD = 6
Offsets = tuple[int, int, int, int]  # slots of the first microbatch: F of chunk 0, F of 1, backward of 1, backward of 0


def v_pattern(pipeline_size: int, offsets: Callable[[int, int], Offsets]) -> Pattern:
    """The pattern with ``offsets(P, rank)``."""
    return Pattern(PERIOD, tuple(_of_rank(offsets(pipeline_size, rank)) for rank in range(pipeline_size)))


def _of_rank(offsets: Offsets) -> dict[tuple[str, int], float]:
    f0, f1, b1, b0 = offsets
    return {(FORWARD, 0): f0, (FORWARD, 1): f1, (BACKWARD, 1): b1, (BACKWARD, 0): b0}


def _squeezed(shape: Shape, offsets: Callable[[int, int], Offsets], split: bool) -> list[Order]:
    """The pattern repeated, without its empty slots."""
    return in_pattern_order(_placement(shape), shape.num_microbatches, v_pattern(shape.pipeline_size, offsets), split)


def _shortest(
    shape: Shape, offsets: Callable[[int, int], Offsets], chunks_in_memory: int, rules: Iterable[Rules]
) -> list[Order]:
    """The shortest of what the greedy scheduler makes of the pattern under ``rules``, in unit times and with at most
    that many chunks in memory.

    Warm-up and cool-down, where the pattern leaves slots empty, are so filled; the pattern's own order where every
    rule gets stuck.
    """
    placement = _placement(shape)
    pattern = v_pattern(shape.pipeline_size, offsets)
    memory = MemoryModel.in_chunks(placement, chunks_in_memory)
    costs = StageCosts.uniform(placement.num_stages)
    best: Scheduled | None = None
    for rule in rules:
        found = schedule(placement, shape.num_microbatches, pattern, memory, costs, rule)
        if found is not None and (best is None or found.makespan < best.makespan):
            best = found
    return best.orders if best is not None else _squeezed(shape, offsets, split=True)


def _placement(shape: Shape) -> Placement:
    return Placement(V_SHAPE, shape.pipeline_size, 2)


def v_half_offsets(size: int, rank: int) -> Offsets:
    pause = 3 if size % 2 == 0 else 0
    return 2 * rank, 3 * size - 2 - rank, 3 * size - 1 + pause + 2 * rank, 6 * size - 2 + pause - rank


def v_half(shape: Shape) -> list[Order]:
    """Half of 1F1B's memory, half of its bubble (arXiv 2405.15362, section 4 and appendix A).

    Chunk 0 goes down the ranks at half speed and chunk 1 comes back at full speed, forwards and backwards, so that
    ranks have slack where V-Min has none; floor((P+2)/2) microbatches are in memory. Warm-up and cool-down are filled
    greedily (section 4.3's reordering), by the best of a few rules.
    """
    rules = [Rules(ahead=ahead, reserve=reserve) for ahead in (0, 2, 5) for reserve in (0, 1, 2)]
    return _shortest(shape, v_half_offsets, 2 * ((shape.pipeline_size + 2) // 2), rules)


def v_min_offsets(size: int, rank: int) -> Offsets:
    pause = 2 if size % 3 == 0 else 0
    return rank, 2 * size - 1 - rank, 2 * size + pause + rank, 4 * size + pause - 1 - rank


def v_min(shape: Shape) -> list[Order]:
    """A third of 1F1B's memory, two thirds of its bubble (arXiv 2405.15362, section 4 and appendix A).

    Forwards and backwards follow each other without a pause over all 2P stages, the shortest life a microbatch can
    have: floor((P+4)/3) of them are in memory. The pause of two slots at the turn where P is a multiple of 3 keeps the
    repeated pattern from colliding with itself.
    """
    return _squeezed(shape, v_min_offsets, split=True)


def one_f_one_b_v_offsets(size: int, rank: int) -> Offsets:
    return rank, 2 * size - 1 - rank, _backward_slot(size, rank), _backward_slot(size, 2 * size - 1 - rank)


def _backward_slot(size: int, k: int) -> int:
    """The slot of the k-th backward, counted from the last stage."""
    first = 2 * size + (3 if size % 3 == 0 else 0)
    pauses = (k + (1 - size) % 3) // 3
    return first + 2 * k + 3 * pauses


def one_f_one_b_v(shape: Shape) -> list[Order]:
    """The V placement without splitting backwards: 1F1B's bubble for two thirds of its memory (arXiv 2405.15362,
    appendix).

    A backward takes two slots of the pattern. Forwards pass from stage to stage without a pause; backwards pause for
    three slots after every third stage, which keeps the repeated pattern from colliding with itself. floor((2P+3)/3)
    microbatches are in memory.
    """
    return _squeezed(shape, one_f_one_b_v_offsets, split=False)


def zb_v(shape: Shape) -> list[Order]:
    """No bubble within a rank's own span for 1F1B's memory, if F, B and W take the same time (arXiv 2401.10241,
    section 6).

    With M >= 2P, in four phases; 2P chunks, that is P microbatches, are in memory on every rank. With fewer
    microbatches the phases leave gaps, and the greedy scheduler fills them under the same memory.
    """
    size, microbatches = shape.pipeline_size, shape.num_microbatches
    if microbatches >= 2 * size:
        return [_zb_v_phases(size, microbatches, rank) for rank in range(size)]
    rules = [Rules(ahead=PERIOD * size * share / 2, reserve=reserve) for share in (1, 2) for reserve in (0, 1)]
    return _shortest(shape, v_half_offsets, 2 * size, rules)


def _zb_v_phases(size: int, microbatches: int, rank: int) -> Order:
    writer = PhaseWriter()
    _zb_v_warmup(writer, size, rank)
    while writer.done["F1"] < microbatches:  # steady: one microbatch in, one out
        if writer.done["F0"] < microbatches:
            writer.forward(0)
        _split_and_weight(writer, 0)
        writer.forward(1)
        _split_and_weight(writer, 1)
    for _ in range(rank):  # gradients first: the ranks in front wait for them
        writer.backward(0, split=True)
        writer.backward(1, split=True)
    while writer.done["B0"] < microbatches:
        writer.backward(0, split=True)
        writer.weight()
    writer.all_weights()
    return writer.order


def _zb_v_warmup(writer: PhaseWriter, size: int, rank: int) -> None:
    """Forwards until the first activation is back from the turn, then the first gradients."""
    for _ in range(2 * (size - rank) - 1):
        writer.forward(0)
    for _ in range(rank):
        writer.forward(1)
        writer.forward(0)
    for _ in range(size - rank):
        writer.forward(1)
        _split_and_weight(writer, 1)


def _split_and_weight(writer: PhaseWriter, chunk: int) -> None:
    writer.backward(chunk, split=True)
    writer.weight()


FAMILIES = (
    Family(
        ZB_V,
        zb_v,
        source="arXiv 2401.10241, section 6",
        summary="no bubble within a rank's span for 1F1B's memory; V placement",
        placement=V_SHAPE,
        chunks=2,
        splits_weight=True,
    ),
    Family(
        V_HALF,
        v_half,
        source="arXiv 2405.15362, section 4",
        summary="half of 1F1B's memory and bubble; V placement",
        placement=V_SHAPE,
        chunks=2,
        splits_weight=True,
    ),
    Family(
        V_MIN,
        v_min,
        source="arXiv 2405.15362, section 4",
        summary="a third of 1F1B's memory, two thirds of its bubble; V placement",
        placement=V_SHAPE,
        chunks=2,
        splits_weight=True,
    ),
    Family(
        ONE_F_ONE_B_V,
        one_f_one_b_v,
        source="arXiv 2405.15362, appendix",
        summary="1F1B's bubble for two thirds of its memory, backwards unsplit; V placement",
        placement=V_SHAPE,
        chunks=2,
    ),
)

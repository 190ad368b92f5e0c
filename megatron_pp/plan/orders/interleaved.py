"""Orders in which the several chunks of a rank take turns: interleaved 1F1B."""

from functools import partial

from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.orders.family import INTERLEAVED, Family, Order, Shape, every_group
from megatron_pp.plan.orders.one_chunk import in_order, warmup_then_steady


def interleaved(shape: Shape) -> list[Order]:
    """A rank's V chunks take turns, a group of G microbatches at a time.

    Rank r warms up with 2 (P-1-r) + (V-1) G forwards, Megatron's number, then alternates. Backwards follow the same
    table with the chunks reversed. G = P is the classic order; G > P trades memory for slack between a chunk and the
    next one. Where a group is shorter than P, backwards may overtake forwards that still wait for their input.
    """
    return overtaken(shape, in_turns(shape))


def in_turns(shape: Shape, extra_warmup: int = 0) -> list[Order]:
    """Strictly alternating orders. ``extra_warmup``: forwards in the warm-up in addition to Megatron's number."""
    table = schedule_table(shape.num_microbatches, shape.num_chunks, shape.group_size)
    forwards, backwards = in_order(shape, table)
    ranks = range(shape.pipeline_size)
    return [warmup_then_steady(forwards, backwards, warmup_forwards(shape, r) + extra_warmup) for r in ranks]


def overtaken(shape: Shape, strict: list[Order]) -> list[Order]:
    """The orders; if ``shape`` has a short group, with backwards that overtake forwards."""
    if not has_short_group(shape):
        return strict
    from megatron_pp.plan.orders.overtaking import let_backwards_overtake  # few steps have such a group

    return let_backwards_overtake(strict, Placement(LOOP, shape.pipeline_size, shape.num_chunks))


def schedule_table(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) for each virtual microbatch: group by group, within a group chunk by chunk. The last group
    may be short.

    P=2, G=3, M=5, V=2 gives microbatches 0 1 2 0 1 2 3 4 3 4 on chunks 0 0 0 1 1 1 0 0 1 1.
    """
    return [
        (mb, chunk)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for mb in range(start, min(start + group_size, num_microbatches))
    ]


def warmup_forwards(shape: Shape, rank: int) -> int:
    """The number of forwards of ``rank`` before it first alternates, at most all of them."""
    warmup = 2 * (shape.pipeline_size - 1 - rank) + (shape.num_chunks - 1) * shape.group_size
    return min(warmup, shape.num_chunks * shape.num_microbatches)


def has_short_group(shape: Shape) -> bool:
    """Whether a group has fewer microbatches than there are ranks: legal here, with a bubble (Megatron refuses it)."""
    last = shape.num_microbatches % shape.group_size or shape.group_size
    return shape.num_chunks > 1 and last < shape.pipeline_size


def is_in_step(shape: Shape) -> bool:
    """Whether all ranks of an interleaved order alternate forwards and backwards together for most of the step. With a
    short group some ranks wait for others, and with one microbatch per rank hardly any alternate."""
    several = shape.num_microbatches > shape.pipeline_size
    return shape.num_chunks > 1 and several and not has_short_group(shape)


in_step_family = partial(Family, grouped=True, repeats=every_group, joint=is_in_step)

FAMILIES = (
    in_step_family(
        INTERLEAVED,
        interleaved,
        "arXiv 2104.04473, section 2.2.2",
        "V chunks a rank take turns; bubble 1/V of 1F1B's for V times its transfers",
    ),
)

"""Interleaved 1F1B (arXiv 2104.04473, section 2.2.2): a rank's V chunks take turns, a group of G microbatches at a
time.

Rank r warms up with 2 (P-1-r) + (V-1) G forwards, Megatron's number, then alternates. Backwards follow the same table
with the chunks reversed. G = P is the classic order; G > P trades memory for slack between a chunk and the next one.
Where a group is shorter than P, backwards may overtake forwards that still wait for their input.
"""

from __future__ import annotations

from megatron_pp.plan.orders.family import Order, Shape, b, f
from megatron_pp.plan.orders.one_f_one_b import warmup_then_steady
from megatron_pp.plan.orders.overtake import let_backwards_overtake
from megatron_pp.plan.placement import LOOP, Placement


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
    """Forwards that rank ``rank`` runs before its first alternation, never more than there are."""
    warmup = 2 * (shape.pipeline_size - 1 - rank) + (shape.num_chunks - 1) * shape.group_size
    return min(warmup, shape.num_chunks * shape.num_microbatches)


def orders(shape: Shape) -> list[Order]:
    table = schedule_table(shape.num_microbatches, shape.num_chunks, shape.group_size)
    forwards = [f(c, m) for m, c in table]
    backwards = [b(shape.num_chunks - 1 - c, m) for m, c in table]
    ranks = range(shape.pipeline_size)
    strict = [warmup_then_steady(forwards, backwards, warmup_forwards(shape, r)) for r in ranks]
    if not has_short_group(shape):
        return strict
    return let_backwards_overtake(strict, Placement(LOOP, shape.pipeline_size, shape.num_chunks))


def has_short_group(shape: Shape) -> bool:
    """Whether a group has fewer microbatches than there are ranks: legal here, with a bubble (Megatron refuses it)."""
    last = shape.num_microbatches % shape.group_size or shape.group_size
    return shape.num_chunks > 1 and last < shape.pipeline_size

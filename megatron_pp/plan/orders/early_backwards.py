"""Interleaved orders that trade bubble for memory, by early backwards and small groups (arXiv 2503.01328)."""

from dataclasses import replace
from functools import partial

from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.orders.family import Family, Order, Repeats, Shape
from megatron_pp.plan.orders.interleaved import schedule_table
from megatron_pp.plan.orders.one_chunk import in_order, warmup_then_steady
from megatron_pp.plan.orders.overtaking import let_backwards_overtake


def gis(shape: Shape) -> list[Order]:
    """Interleaved 1F1B that begins backwards as early as possible, in groups of G <= P microbatches.

    Rank r runs (V-1) G + P - r forwards before its first backward, P-1-r fewer than interleaved 1F1B, and waits for
    that backward instead: the bubble is the same, the peak (V-1) G + P - r chunks. A group smaller than P waits P - G
    slots before each further chunk.
    """
    size = shape.pipeline_size
    chunks = shape.num_chunks
    group = _group_of_gis(shape)
    forwards, backwards = in_order(shape, schedule_table(shape.num_microbatches, chunks, group))
    orders = [warmup_then_steady(forwards, backwards, (chunks - 1) * group + size - 1 - r) for r in range(size)]
    return let_backwards_overtake(orders, Placement(LOOP, size, chunks))


def _group_of_gis(shape: Shape) -> int:
    return min(shape.group_size, shape.pipeline_size)


def gis_h(shape: Shape) -> list[Order]:
    """`gis` in groups of at most half the ranks."""
    return gis(replace(shape, group_size=group_of_gis_h(shape)))


def group_of_gis_h(shape: Shape) -> int:
    return min(shape.group_size, (shape.pipeline_size + 1) // 2)


_grouped = partial(Family, grouped=True, small_groups=True)

FAMILIES = (
    _grouped(
        "gis",
        gis,
        "arXiv 2503.01328, section 3.2",
        "interleaved 1F1B's bubble in V P chunks of memory; in groups of G < P less memory, more bubble",
        repeats=lambda shape: Repeats(_group_of_gis(shape)),
    ),
    _grouped(
        "gis_h",
        gis_h,
        "arXiv 2503.01328, section 3.2",
        "gis in groups of at most P/2: about half of interleaved 1F1B's memory for more bubble",
        repeats=lambda shape: Repeats(group_of_gis_h(shape)),
    ),
)

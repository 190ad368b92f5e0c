"""The order that spreads copies of offloaded chunks evenly over the step (arXiv 2503.01328)."""

import math

from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.orders.early_backwards import group_of_gis_h
from megatron_pp.plan.orders.family import Family, Order, Repeats, Shape, b, f
from megatron_pp.plan.orders.overtaking import let_backwards_overtake


def pipe_offload(shape: Shape) -> list[Order]:
    """`gis_h` with the chunks of a group in turn, not one after the other: of V forwards in a row each is of another
    chunk, so that copies of offloaded chunks are spread evenly over the step.

    A microbatch reaches its next chunk G turns later, or as few more as V chunks need to take turns. A turn is a
    forward and a backward. While the first and the last microbatches fill some turns in part, the others move up."""
    size = shape.pipeline_size
    chunks = shape.num_chunks
    mbs = range(shape.num_microbatches)
    group = group_of_gis_h(shape)
    together = chunks // math.gcd(chunks, group)
    after = [group * c + c // together for c in range(chunks)]  # turns, each at another place among ``chunks`` of them
    forwards = [((chunks * m + after[c], 0), f(c, m)) for m in mbs for c in range(chunks)]
    backwards = [((chunks * m + after[c], 1), b(chunks - 1 - c, m)) for m in mbs for c in range(chunks)]
    orders = []
    for rank in range(size):
        first = after[-1] + size - 1 - rank  # the turn of the first backward
        late = [((turn + first, half), at) for (turn, half), at in backwards]
        orders.append([at for _, at in sorted(forwards + late)])
    return let_backwards_overtake(orders, Placement(LOOP, size, chunks))


FAMILIES = (
    Family(
        "pipe_offload",
        pipe_offload,
        "arXiv 2503.01328, section 3",
        "gis_h with half of the chunks offloaded, those kept longest: about (V+2)/(8V) of all activations stay",
        grouped=True,
        small_groups=True,
        repeats=lambda shape: Repeats(1),
        added=lambda shape: {"offload_chunks": (shape.num_chunks + 1) // 2},
    ),
)

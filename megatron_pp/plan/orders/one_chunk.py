"""One chunk a rank: GPipe, 1F1B and eager 1F1B, and the warm-up that orders of several chunks share.

Backwards are whole, and run in the order of the forwards of their chunk, so that gradients are added up in one order
and are equal to the last bit from family to family.
"""

from functools import partial

from megatron_pp.plan.orders.family import ONE_F_ONE_B, Family, Order, Shape, b, every_microbatch, f


def one_f_one_b(shape: Shape, extra_warmup: int = 0) -> list[Order]:
    """P-1-r warm-up forwards, then one forward and one backward in turn. Rank r holds at most P - r microbatches.

    ``extra_warmup``: further forwards in the warm-up.
    """
    return _one_chunk(shape, [shape.pipeline_size - 1 - rank + extra_warmup for rank in range(shape.pipeline_size)])


def eager_1f1b(shape: Shape) -> list[Order]:
    """Rank r runs 2 (P-1-r) + 1 forwards before its first backward, where 1F1B runs P - r.

    1F1B has just enough microbatches between neighbouring ranks to keep them busy when transfers take no time: each
    transfer of the steady state is waited for. Nearly twice as many, at most 2 (P-r) - 1 in memory, hide transfers of
    up to half a forward and backward.
    """
    return _one_chunk(shape, [2 * (shape.pipeline_size - 1 - rank) for rank in range(shape.pipeline_size)])


def breadth_first(shape: Shape) -> list[Order]:
    """Every chunk runs all its microbatches before the next chunk starts, backwards likewise in reverse. Largest memory
    (V M chunks), but each chunk's parameters and gradients are used in one stretch, which suits sharded data
    parallelism. With one chunk it is GPipe.
    """
    chunks, mbs = range(shape.num_chunks), range(shape.num_microbatches)
    order = [f(c, m) for c in chunks for m in mbs] + [b(c, m) for c in reversed(chunks) for m in mbs]
    return [order] * shape.pipeline_size


def _one_chunk(shape: Shape, warmups: list[int]) -> list[Order]:
    forwards, backwards = in_order(shape, [(m, 0) for m in range(shape.num_microbatches)])
    return [warmup_then_steady(forwards, backwards, warmup) for warmup in warmups]


def in_order(shape: Shape, table: list[tuple[int, int]]) -> tuple[Order, Order]:
    """Forwards and backwards of a rank whose (microbatch, chunk) take turns as in ``table``, backwards with the chunks
    reversed.
    """
    last = shape.num_chunks - 1
    return [f(c, m) for m, c in table], [b(last - c, m) for m, c in table]


def warmup_then_steady(forwards: Order, backwards: Order, warmup: int) -> Order:
    """``warmup`` forwards, then a forward and a backward in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - warmup :]


one_chunk_family = partial(Family, chunks=1, repeats=every_microbatch)

FAMILIES = (
    Family(
        "gpipe",
        breadth_first,
        "arXiv 1811.06965, section 2.3",
        "all forwards, then all backwards; M microbatches in memory",
        chunks=1,
    ),
    one_chunk_family(
        ONE_F_ONE_B,
        one_f_one_b,
        "arXiv 2104.04473, section 2.2.1",
        "P-1-r warm-up forwards, then one forward, one backward; P-r microbatches in memory",
    ),
    one_chunk_family(
        "eager_1f1b",
        eager_1f1b,
        "arXiv 2211.05322, section 5",
        "1F1B with twice the warm-up: hides transfers that 1F1B waits for; 2 (P-r) - 1 microbatches in memory",
    ),
    Family(
        "breadth_first",
        breadth_first,
        "arXiv 2211.05953, section 4",
        "every chunk runs all its microbatches in one stretch; V M chunks in memory",
    ),
)

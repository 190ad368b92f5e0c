"""The naive schedule, a measure for others: one microbatch at a time goes forward and back through the pipeline."""

from megatron_pp.plan.orders.family import Family, Order, Shape, b, f

NAIVE = "naive"


def naive_orders(shape: Shape) -> list[Order]:
    """Each microbatch goes through all of a rank's chunks, forward and back: with one chunk, F0 B0 F1 B1 ..."""
    chunks = range(shape.num_chunks)
    order: Order = []
    for m in range(shape.num_microbatches):
        order += [f(c, m) for c in chunks] + [b(c, m) for c in reversed(chunks)]
    return [order] * shape.pipeline_size


NAIVE_FAMILY = Family(NAIVE, naive_orders, source="", summary="one microbatch at a time", chunks=1)

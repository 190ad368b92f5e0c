"""Interleaved 1F1B with a warm-up that lets forwards and backwards run in pairs."""

from megatron_pp.plan.orders.family import Order, Repeats, Shape, every_group, every_microbatch
from megatron_pp.plan.orders.interleaved import in_step_family, in_turns, overtaken


def combined_1f1b(shape: Shape) -> list[Order]:
    """Interleaved 1F1B with one forward more in the warm-up, Megatron's order for ``overlap_moe_expert_parallel_comm``:
    no backward needs the forward right before it, so that from then on the two run as one (``overlap_pairs``).

    With one chunk a rank, as with several, a microbatch needs a pair's time on each rank on its way down and on its way
    back: 2 (P-1-r) + 1 forwards, so that no pair waits for another rank's.
    """
    return overtaken(shape, in_turns(shape, extra_warmup=1))


def _repeats(shape: Shape) -> Repeats:
    return every_group(shape) if shape.num_chunks > 1 else every_microbatch(shape)


FAMILIES = (
    in_step_family(
        "combined_1f1b",
        combined_1f1b,
        "Megatron-core, overlap_moe_expert_parallel_comm; arXiv 2412.19437, section 3.2.1, for the pairs",
        "interleaved 1F1B whose forwards and backwards run in pairs, for one chunk more in memory",
        repeats=_repeats,
    ),
)

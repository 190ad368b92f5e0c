"""What the families on the V placement share: their repeating pattern, in unit slots (arXiv 2405.15362, sections 3
and 4).

All of them have two chunks a rank and a period of 6 slots, the work of one microbatch on one rank: two forwards, two
backwards, two weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_pp.plan.costs import StageCosts
from megatron_pp.plan.greedy import MemoryModel, Pattern, Rules, Scheduled, in_pattern_order, schedule
from megatron_pp.plan.instruction import BACKWARD, FORWARD
from megatron_pp.plan.orders.family import Order, Shape
from megatron_pp.plan.placement import V_SHAPE, Placement

PERIOD = 6
Offsets = tuple[
    int, int, int, int
]  # slots of the first microbatch: F of chunk 0, F of chunk 1, B of chunk 1, B of chunk 0


def v_pattern(pipeline_size: int, offsets: Callable[[int, int], Offsets]) -> Pattern:
    """The pattern with ``offsets(P, rank)``."""
    return Pattern(PERIOD, tuple(_of_rank(offsets(pipeline_size, rank)) for rank in range(pipeline_size)))


def _of_rank(offsets: Offsets) -> dict[tuple[str, int], float]:
    f0, f1, b1, b0 = offsets
    return {(FORWARD, 0): f0, (FORWARD, 1): f1, (BACKWARD, 1): b1, (BACKWARD, 0): b0}


def squeezed(shape: Shape, offsets: Callable[[int, int], Offsets], split: bool) -> list[Order]:
    """The pattern repeated, without its empty slots."""
    return in_pattern_order(_placement(shape), shape.num_microbatches, v_pattern(shape.pipeline_size, offsets), split)


def shortest(
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
    return best.orders if best is not None else squeezed(shape, offsets, split=True)


def _placement(shape: Shape) -> Placement:
    return Placement(V_SHAPE, shape.pipeline_size, 2)

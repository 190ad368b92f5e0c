"""ZB-V (arXiv 2401.10241, section 6): on the V placement, no bubble within a rank's own span for 1F1B's memory, if F,
B and W take the same time.

With M >= 2P, in four phases; 2P chunks, that is P microbatches, are in memory on every rank. With fewer microbatches
the phases leave gaps, and the greedy scheduler fills them under the same memory.
"""

from __future__ import annotations

from megatron_pp.plan.greedy import Rules
from megatron_pp.plan.orders import v_half
from megatron_pp.plan.orders.family import Order, Shape
from megatron_pp.plan.orders.phases import PhaseWriter
from megatron_pp.plan.orders.v_pattern import PERIOD, shortest


def orders(shape: Shape) -> list[Order]:
    size, microbatches = shape.pipeline_size, shape.num_microbatches
    if microbatches >= 2 * size:
        return [_in_phases(size, microbatches, rank) for rank in range(size)]
    rules = [Rules(ahead=PERIOD * size * share / 2, reserve=reserve) for share in (1, 2) for reserve in (0, 1)]
    return shortest(shape, v_half.offsets, 2 * size, rules)


def _in_phases(size: int, microbatches: int, rank: int) -> Order:
    rank_order = PhaseWriter()
    _warm_up(rank_order, size, rank)
    while rank_order.done["F1"] < microbatches:  # steady: one microbatch in, one out
        if rank_order.done["F0"] < microbatches:
            rank_order.forward(0)
        _split_and_weight(rank_order, 0)
        rank_order.forward(1)
        _split_and_weight(rank_order, 1)
    for _ in range(rank):  # gradients first: the ranks in front wait for them
        rank_order.backward(0, split=True)
        rank_order.backward(1, split=True)
    while rank_order.done["B0"] < microbatches:
        rank_order.backward(0, split=True)
        rank_order.weight()
    rank_order.all_weights()
    return rank_order.order


def _warm_up(rank_order: PhaseWriter, size: int, rank: int) -> None:
    """Forwards until the first activation is back from the turn, then the first gradients."""
    for _ in range(2 * (size - rank) - 1):
        rank_order.forward(0)
    for _ in range(rank):
        rank_order.forward(1)
        rank_order.forward(0)
    for _ in range(size - rank):
        rank_order.forward(1)
        _split_and_weight(rank_order, 1)


def _split_and_weight(rank_order: PhaseWriter, chunk: int) -> None:
    rank_order.backward(chunk, split=True)
    rank_order.weight()

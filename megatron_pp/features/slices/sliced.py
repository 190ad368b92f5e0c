"""Schedules of sequences in slices (Seq1F1B, arXiv 2406.03488).

The orders are those of whole sequences with slices in place of microbatches. One thing differs: forwards of a
microbatch run from its first slice to its last, and backwards from the last to the first (``causal.py``). So a rank's
first backward waits for the forwards of a whole microbatch, and its warm-up is n-1 forwards longer. With n slices of
equal cost, which is what ``slice_costs.py`` cuts for causal attention, the bubble of ``seq_1f1b`` is (P-1) / (n M +
P-1), and rank r holds at most (n + P-1-r) / n microbatches, where 1F1B holds P-r.
"""

from collections.abc import Callable
from dataclasses import replace

from megatron_pp.plan.ir.instruction import FORWARD, instruction
from megatron_pp.plan.orders import interleaved, one_chunk, zero_bubble
from megatron_pp.plan.orders.family import INTERLEAVED, ONE_F_ONE_B, Family, Order, Shape

_WHOLE = {family.name: family for room in (one_chunk, interleaved, zero_bubble) for family in room.FAMILIES}
_SOURCE = "arXiv 2406.03488"
_SPLIT = f"{_SOURCE}, with the split of arXiv 2401.10241"


def seq_1f1b(shape: Shape) -> list[Order]:
    return _in_slices(one_chunk.one_f_one_b(of_slices(shape), shape.num_parts - 1), shape.num_parts)


def interleaved_seq_1f1b(shape: Shape) -> list[Order]:
    orders = interleaved.in_turns(of_slices(shape), shape.num_parts - 1)
    return interleaved.overtaken(of_slices(shape), _in_slices(orders, shape.num_parts))


def seq_zb(shape: Shape) -> list[Order]:
    return _delayed(seq_1f1b(shape))


def interleaved_seq_zb(shape: Shape) -> list[Order]:
    return _delayed(interleaved_seq_1f1b(shape))


def of_slices(shape: Shape) -> Shape:
    """The shape with slices in place of microbatches."""
    slices = shape.num_parts
    return replace(
        shape, num_microbatches=slices * shape.num_microbatches, group_size=slices * shape.group_size, num_parts=1
    )


def _in_slices(orders: list[Order], slices: int) -> list[Order]:
    """The orders of forwards and whole backwards with numbers of microbatches turned into microbatch and slice."""
    if slices == 1:
        return orders
    cut: list[Order] = []
    for order in orders:
        cut.append([])
        for at in order:
            mb, place = divmod(at.mb, slices)
            part = place if at.op == FORWARD else slices - 1 - place
            cut[-1].append(instruction(at.op, at.chunk, mb, part))
    return cut


def _delayed(orders: list[Order]) -> list[Order]:
    return [zero_bubble.delay_weights(order, delay=rank) for rank, order in enumerate(orders)]


def _is_in_step(shape: Shape) -> bool:
    return interleaved.is_in_step(of_slices(shape))


def _sliced(whole: str, orders: Callable[[Shape], list[Order]], source: str, summary: str) -> Family:
    family = replace(_WHOLE[whole], name=orders.__name__, orders=orders, source=source, summary=summary, sliced=True)
    return replace(family, joint=_is_in_step) if family.grouped else family


FAMILIES = (
    _sliced(
        ONE_F_ONE_B,
        seq_1f1b,
        _SOURCE,
        "1F1B on n slices of every sequence: bubble (P-1)/(nM+P-1); (n+P-1-r)/n microbatches in memory",
    ),
    _sliced(
        INTERLEAVED,
        interleaved_seq_1f1b,
        _SOURCE,
        "interleaved 1F1B on slices of every sequence; V chunks a rank take turns after P slices",
    ),
    _sliced("zb_h1", seq_zb, _SPLIT, "Seq1F1B with weight gradients in its bubble"),
    _sliced("interleaved_zb", interleaved_seq_zb, _SPLIT, "interleaved Seq1F1B with weight gradients in its bubble"),
)

"""Zero-bubble families on the loop placement (arXiv 2401.10241, section 2): weight gradients are taken out of the
backwards and fill the bubble."""

from megatron_pp.plan.ir.instruction import BACKWARD
from megatron_pp.plan.orders.family import Order, Shape, i, w
from megatron_pp.plan.orders.interleaved import in_step_family, interleaved
from megatron_pp.plan.orders.one_chunk import eager_1f1b, one_chunk_family, one_f_one_b


def zb_h1(shape: Shape) -> list[Order]:
    """1F1B with split weight gradients: rank r runs that of microbatch k - r right after the backward of k, and the
    last r at the end, where 1F1B has its bubble.

    Backwards reach the next rank earlier by one W, so the bubble is (P-1)(F+B-W). Every rank holds P microbatches, as
    the first rank of 1F1B does.
    """
    return [delay_weights(order, delay=rank) for rank, order in enumerate(one_f_one_b(shape))]


def interleaved_zb(shape: Shape) -> list[Order]:
    """ZB-H1's idea on the interleaved order: rank r runs each weight gradient r backwards late, on virtual
    microbatches. Bubble (P-1)(f+b-w) of one chunk's times, for interleaved 1F1B's memory.
    """
    return [delay_weights(order, delay=rank) for rank, order in enumerate(interleaved(shape))]


def delay_weights(order: Order, delay: int) -> Order:
    """Split every backward of ``order``: each weight gradient runs right after the backward ``delay`` places later,
    the last ones at the end.
    """
    result: Order = []
    waiting: Order = []
    for at in order:
        if at.op != BACKWARD:
            result.append(at)
            continue
        result.append(i(at.chunk, at.mb, at.part))
        waiting.append(w(at.chunk, at.mb, at.part))
        if len(waiting) > delay:
            result.append(waiting.pop(0))
    return result + waiting


def zb_h2(shape: Shape) -> list[Order]:
    """No bubble within a rank's own span, for about twice the memory of 1F1B.

    Rank r warms up with 2 (P-r) - 1 forwards, as in eager 1F1B, so that it has work until the first gradient comes
    back, and keeps 2 r weight gradients for the end, so that it has work until the last rank is done. At most 2 P - 1
    microbatches in memory, on every rank; the first P-1 forwards' delay remains in the makespan.
    """
    return [delay_weights(order, delay=2 * rank) for rank, order in enumerate(eager_1f1b(shape))]


FAMILIES = (
    one_chunk_family(
        "zb_h1",
        zb_h1,
        "arXiv 2401.10241, section 2.1",
        "1F1B with weight gradients in its bubble: (P-1)(F+B-W) is left; P microbatches in memory",
        splits_weight=True,
    ),
    one_chunk_family(
        "zb_h2",
        zb_h2,
        "arXiv 2401.10241, section 2.2",
        "no bubble within a rank's span (counts on the optimizer bypass); 2P-1 microbatches in memory",
        splits_weight=True,
    ),
    in_step_family(
        "interleaved_zb",
        interleaved_zb,
        "arXiv 2104.04473, section 2.2.2, with the split of arXiv 2401.10241",
        "interleaved 1F1B with weight gradients in its bubble, at the same memory",
        splits_weight=True,
    ),
)

"""Sequences cut into slices (Seq1F1B, arXiv 2406.03488).

The same orders with slices in place of microbatches, but for one thing: forwards of a microbatch run from its first
slice to its last, backwards from the last to the first (``dataflow.slice_before``). So a rank's first backward waits
for the forwards of a whole microbatch, and its warm-up is n-1 forwards longer. With n slices of equal cost, which is
what ``slice_costs.py`` cuts for causal attention, the bubble of ``seq_1f1b`` is (P-1) / (n M + P-1), and rank r holds
at most (n + P-1-r) / n microbatches, where 1F1B holds P-r.
"""

from dataclasses import replace

from megatron_pp.plan.orders import interleaved, one_chunk, zero_bubble
from megatron_pp.plan.orders.family import INTERLEAVED, INTERLEAVED_SEQ, ONE_F_ONE_B, SEQ_1F1B, Family

_WHOLE = {family.name: family for room in (one_chunk, interleaved, zero_bubble) for family in room.FAMILIES}
_SOURCE = "arXiv 2406.03488"
_SPLIT = f"{_SOURCE}, with the split of arXiv 2401.10241"


def _sliced(whole: str, name: str, source: str, summary: str) -> Family:
    return replace(_WHOLE[whole], name=name, source=source, summary=summary, sliced=True)


FAMILIES = (
    _sliced(
        ONE_F_ONE_B,
        SEQ_1F1B,
        _SOURCE,
        "1F1B on n slices of every sequence: bubble (P-1)/(nM+P-1); (n+P-1-r)/n microbatches in memory",
    ),
    _sliced(
        INTERLEAVED,
        INTERLEAVED_SEQ,
        _SOURCE,
        "interleaved 1F1B on slices of every sequence; V chunks a rank take turns after P slices",
    ),
    _sliced("zb_h1", "seq_zb", _SPLIT, "Seq1F1B with weight gradients in its bubble"),
    _sliced("interleaved_zb", "interleaved_seq_zb", _SPLIT, "interleaved Seq1F1B with weight gradients in its bubble"),
)

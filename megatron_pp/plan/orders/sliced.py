"""Families that cut every sequence into slices and schedule those (Seq1F1B, arXiv 2406.03488).

They are the orders of ``loop.py`` with slices in place of microbatches, but for one thing: forwards of a microbatch run
from its first slice to its last, backwards from the last to the first (``dataflow.slice_before``). So a rank's first
backward waits for the forwards of a whole microbatch, and its warm-up is n-1 forwards longer.

With n slices of equal cost, which is what ``slice_costs.py`` cuts for causal attention, the bubble of ``seq_1f1b`` is
(P-1) / (n M + P-1), and rank r holds at most (n + P-1-r) / n microbatches, where 1F1B holds P-r.
"""

from __future__ import annotations

from megatron_pp.plan.family import Family, every_group, every_microbatch
from megatron_pp.plan.orders.loop import interleaved, interleaved_zb, one_f_one_b, zb_h1

SEQ_1F1B = "seq_1f1b"
INTERLEAVED_SEQ = "interleaved_seq_1f1b"

FAMILIES = (
    Family(
        SEQ_1F1B,
        one_f_one_b,
        "arXiv 2406.03488",
        "1F1B on n slices of every sequence: bubble (P-1)/(nM+P-1); (n+P-1-r)/n microbatches in memory",
        chunks=1,
        repeats=every_microbatch,
        sliced=True,
    ),
    Family(
        INTERLEAVED_SEQ,
        interleaved,
        "arXiv 2406.03488",
        "interleaved 1F1B on slices of every sequence; V chunks a rank take turns after P slices",
        grouped=True,
        repeats=every_group,
        sliced=True,
    ),
    Family(
        "seq_zb",
        zb_h1,
        "arXiv 2406.03488, with the split of arXiv 2401.10241",
        "Seq1F1B with weight gradients in its bubble",
        chunks=1,
        splits_weight=True,
        repeats=every_microbatch,
        sliced=True,
    ),
    Family(
        "interleaved_seq_zb",
        interleaved_zb,
        "arXiv 2406.03488, with the split of arXiv 2401.10241",
        "interleaved Seq1F1B with weight gradients in its bubble",
        splits_weight=True,
        grouped=True,
        repeats=every_group,
        sliced=True,
    ),
)

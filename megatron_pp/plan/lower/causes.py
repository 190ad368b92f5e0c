"""Finds the operations of a rank on which a message to this rank depends."""

from bisect import bisect_left

from megatron_pp.plan.ir.dataflow import RESULT_OF, source_of
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.lower.clock import Clocked


def behind_causes(clocked: Clocked, placement: Placement, rank: int, first: int, source: int, due: int) -> int:
    """The first boundary of ``rank``, not before ``first``, that is behind all of its entries on which a message of
    rank ``source``, made at ``due``, depends: through other messages and through the ranks' orders."""
    ends = clocked.ends
    latest = clocked.ends[rank][first]
    behind = first
    seen = set()
    places = [(source, due)]
    while places:
        one, end = place = places.pop()
        if end < latest or place in seen:
            continue
        seen.add(place)
        at = bisect_left(ends[one], end)
        if one == rank:
            latest = end
            behind = at + 1
            continue
        if at:
            places.append((one, ends[one][at - 1]))
        entry = clocked.orders[one][at]
        for op, stage, mb, _, _, part, _, _ in entry.members or (entry,):
            needed = source_of(op, stage, placement.num_stages)
            results = [] if needed is None else [(RESULT_OF[op], needed)]
            for result in (*results, *placement.collected_inputs(op, stage)):
                places.append((placement.homes[result[1]][0], clocked.result_ends[result][(mb, part)]))
    return behind

"""The logical clock of a compute order: when each operation would end if every one took one slot and transfers took
none.

Lowering hangs communication on this clock. Since every operation takes whole slots, all ranks' boundaries fall on whole
numbers, and the end of the producing operation is a number (the message's *round*) that both ends of a transfer know.
Exchanges that every rank works off in the order of rounds cannot deadlock: the lowest unfinished round waits for
nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.dataflow import RESULT_OF, source_of
from megatron_pp.plan.instruction import BACKWARD, FORWARD, Instruction
from megatron_pp.plan.placement import Placement

_Result = tuple[str, int, int]  # FORWARD or BACKWARD, stage, microbatch
Ends = dict[tuple[str, int], dict[int, int]]  # FORWARD or BACKWARD and stage -> microbatch -> slot


class Clocked(NamedTuple):
    """Orders on the clock. ``ends[rank][i]``: the slot in which ``orders[rank][i]`` ends (the first slot ends at 1).

    ``result_ends``: when an output or input gradient is there.
    """

    orders: list[list[Instruction]]
    ends: list[list[int]]
    result_ends: Ends


def run_clock(orders: Sequence[Sequence[Instruction]], placement: Placement) -> Clocked:
    """Put placed orders on the clock.

    A PAIR takes two slots, and both halves end with it. A pair that would wait in a circle, which its halves alone do
    not, is taken apart. Raises PlanError where an operation waits for one that never comes before it, naming both.
    """
    return _Clock(orders, placement).run()


class _Clock:
    """Runs all ranks' orders against each other, one slot per operation."""

    def __init__(self, orders: Sequence[Sequence[Instruction]], placement: Placement) -> None:
        self.orders = [list(order) for order in orders]
        self.placement = placement
        self.num_stages = placement.num_stages
        self.ends: list[list[int]] = [[] for _ in orders]
        self.result_ends: Ends = {(op, s): {} for op in (FORWARD, BACKWARD) for s in range(self.num_stages)}
        self.waiters: dict[_Result, int] = {}  # result that a rank waits for -> that rank

    def run(self) -> Clocked:
        ready = list(range(len(self.orders)))
        while ready:
            self._advance(ready.pop(), ready)
            if not ready:
                ready = self._take_apart_pairs()
        for rank, order in enumerate(self.orders):
            if len(self.ends[rank]) < len(order):
                raise PlanError(self._why_stuck(rank))
        return Clocked(self.orders, self.ends, self.result_ends)

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Run ``rank`` until it has to wait for another one; wake whoever waited for what it made."""
        order, ends = self.orders[rank], self.ends[rank]
        now = ends[-1] if ends else 0
        while len(ends) < len(order):
            together = order[len(ends)].members or (order[len(ends)],)
            for at in together:
                end = self._input_end(at)
                if end is None:
                    self.waiters[self._needed(at)] = rank
                    return
                now = max(now, end)
            now += len(together)
            ends.append(now)
            for at in together:
                if at.op in RESULT_OF:
                    self.result_ends[(RESULT_OF[at.op], at.stage)][at.mb] = now
                    waiter = self.waiters.pop((RESULT_OF[at.op], at.stage, at.mb), None)
                    if waiter is not None:
                        ready.append(waiter)

    def _input_end(self, at: Instruction) -> int | None:
        """When the result of another stage that ``at`` needs is there: 0 where it needs none, None where not yet."""
        source = source_of(at.op, at.stage, self.num_stages)
        return 0 if source is None else self.result_ends[(RESULT_OF[at.op], source)].get(at.mb)

    def _needed(self, at: Instruction) -> _Result:
        """The result of another stage that ``at`` waits for."""
        source = source_of(at.op, at.stage, self.num_stages)
        assert source is not None
        return RESULT_OF[at.op], source, at.mb

    def _take_apart_pairs(self) -> list[int]:
        """All ranks wait or are done: take apart the pairs whose forward could run by itself; returns their ranks."""
        freed = []
        for rank, order in enumerate(self.orders):
            at = order[len(self.ends[rank])] if len(self.ends[rank]) < len(order) else None
            if at is None or not at.members:
                continue
            if self._input_end(at.members[0]) is not None:
                order[len(self.ends[rank]) : len(self.ends[rank]) + 1] = at.members
                freed.append(rank)
        return freed

    def _why_stuck(self, rank: int) -> str:
        entry = self.orders[rank][len(self.ends[rank])]
        blocked = next(at for at in entry.members or (entry,) if self._input_end(at) is None)
        kind, source, mb = self._needed(blocked)
        peer, chunk = self.placement.homes[source]
        done = len(self.ends[peer])
        peer_at = self.orders[peer][done].name if done < len(self.orders[peer]) else "the end of its order"
        return (
            f"rank {rank} cannot run {blocked} ({blocked.name}): it needs {kind}{chunk}.{mb} of rank {peer}, which is "
            f"stuck before it, at {peer_at}"
        )

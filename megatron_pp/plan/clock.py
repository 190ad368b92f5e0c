"""The logical clock of a compute order: when each operation would end if every one took one slot and transfers took
none.

Lowering hangs communication on this clock. Since every operation takes exactly one slot, all ranks' boundaries fall on
whole numbers, and the end of the producing operation is a number (the message's *round*) that both ends of a transfer
know. Exchanges that every rank works off in the order of rounds can not deadlock: the lowest unfinished round has no
one to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_pp.plan.instruction import BACKWARD, FORWARD, Instruction
from megatron_pp.plan.pairs import Pairs
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.spec import PlanError

NOT_YET = -1


def logical_ends(
    orders: Sequence[Sequence[Instruction]], placement: Placement, num_microbatches: int, pairs: Pairs | None = None
) -> list[list[int]]:
    """``ends[rank][i]``: the slot in which the i-th compute operation of ``rank`` ends (the first slot ends at 1).

    The two operations of one of ``pairs`` take two slots together and end together. A pair that would wait in a circle,
    which its halves alone do not, is taken apart: it is removed from ``pairs``.

    Raises PlanError where an operation waits for one that never comes before it, naming both.
    """
    clock = _Clock(orders, placement, num_microbatches, pairs or [set() for _ in orders])
    return clock.run()


class _Clock:
    """Runs all ranks' orders against each other, one slot per operation."""

    def __init__(
        self, orders: Sequence[Sequence[Instruction]], placement: Placement, num_microbatches: int, pairs: Pairs
    ) -> None:
        self.orders = orders
        self.pairs = pairs
        self.placement = placement
        self.stride = num_microbatches
        cells = placement.num_stages * num_microbatches
        self.forward_end = [NOT_YET] * cells
        self.backward_end = [NOT_YET] * cells
        self.ends: list[list[int]] = [[] for _ in orders]
        self.waiters: dict[tuple[str, int, int], int] = {}  # (op, stage, microbatch) that can not run yet -> its rank

    def run(self) -> list[list[int]]:
        ready = list(range(len(self.orders)))
        while ready:
            self._advance(ready.pop(), ready)
            if not ready:
                ready = self._take_apart_pairs()
        for rank, order in enumerate(self.orders):
            if len(self.ends[rank]) < len(order):
                raise PlanError(self._why_stuck(rank))
        return self.ends

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Run ``rank`` until it has to wait for another one; wake whoever waited for what it made."""
        order, ends, stages = self.orders[rank], self.ends[rank], self.placement.stages[rank]
        now = ends[-1] if ends else 0
        while len(ends) < len(order):
            first = len(ends)
            together = order[first : first + (2 if first in self.pairs[rank] else 1)]
            for op, chunk, mb, _ in together:
                needed = self._input_end(op, stages[chunk], mb)
                if needed == NOT_YET:
                    self.waiters[(op, stages[chunk], mb)] = rank
                    return
                now = max(now, needed)
            now += len(together)
            for op, chunk, mb, _ in together:
                ends.append(now)
                woken = self._record(op, stages[chunk], mb, now)
                if woken is not None:
                    ready.append(woken)

    def _take_apart_pairs(self) -> list[int]:
        """All ranks wait or are done: take apart the pairs whose forward could run by itself; returns their ranks."""
        waiting = [rank for rank, ends in enumerate(self.ends) if len(ends) in self.pairs[rank]]
        freed = [rank for rank in waiting if self._next_input_end(rank) != NOT_YET]
        for rank in freed:
            self.pairs[rank].discard(len(self.ends[rank]))
        return freed

    def _next_input_end(self, rank: int) -> int:
        op, chunk, mb, _ = self.orders[rank][len(self.ends[rank])]
        return self._input_end(op, self.placement.stages[rank][chunk], mb)

    def _input_end(self, op: str, stage: int, mb: int) -> int:
        """The slot at whose end the input from another stage is there: 0 where none is needed, NOT_YET where it has not
        run.
        """
        if op == FORWARD and stage > 0:
            return self.forward_end[(stage - 1) * self.stride + mb]
        if op == BACKWARD and stage < self.placement.num_stages - 1:
            return self.backward_end[(stage + 1) * self.stride + mb]
        return 0

    def _record(self, op: str, stage: int, mb: int, end: int) -> int | None:
        """Note that the operation ended; returns the rank that waited for it, if one did."""
        if op == FORWARD:
            self.forward_end[stage * self.stride + mb] = end
            return self.waiters.pop((FORWARD, stage + 1, mb), None)
        if op == BACKWARD:
            self.backward_end[stage * self.stride + mb] = end
            return self.waiters.pop((BACKWARD, stage - 1, mb), None)
        return None

    def _why_stuck(self, rank: int) -> str:
        blocked = self.orders[rank][len(self.ends[rank])]
        stage = self.placement.stages[rank][blocked.chunk]
        source = stage - 1 if blocked.op == FORWARD else stage + 1
        peer, chunk = self.placement.homes[source]
        done = len(self.ends[peer])
        peer_at = self.orders[peer][done].name if done < len(self.orders[peer]) else "the end of its order"
        return (
            f"rank {rank} can not run {blocked.name}: it needs {blocked.op}{chunk}.{blocked.mb} of rank {peer}, "
            f"which is stuck before it, at {peer_at}"
        )

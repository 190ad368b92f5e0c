"""The logical clock of a compute order: when each operation would end if every one took one slot and transfers took
none.

Lowering hangs communication on this clock. Since every operation takes whole slots, all ranks' boundaries fall on whole
numbers, and the end of the producing operation is a number (the message's *round*) that both ends of a transfer know.
Exchanges that every rank works off in the order of rounds cannot deadlock: the lowest unfinished round waits for
no other.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.dataflow import RESULT_OF, Result, collected_inputs, source_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, OUTPUT_OPS, Instruction
from megatron_pp.plan.ir.placement import Placement

Ends = dict[Result, dict[tuple[int, int], int]]  # result -> (microbatch, slice) -> slot


class Clocked(NamedTuple):
    """Orders on the clock. ``ends[rank][i]``: the slot in which ``orders[rank][i]`` ends (the first slot ends at 1).

    ``result_ends``: when an output or input gradient is there, and when a pass of a split output layer has run.
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
        self.result_ends |= {(op, s): {} for op in OUTPUT_OPS for s in placement.output_stages}
        # By result: the microbatch and slice that ranks wait for -> those ranks.
        self.waiters: dict[Result, dict[tuple[int, int], list[int]]] = {result: {} for result in self.result_ends}
        # By op and stage: the results that it needs of other operations of other stages, and leaves.
        self.sites: dict[tuple[str, int], tuple[tuple[Result, ...], Result | None]] = {}

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
        result_ends, waiters, sites = self.result_ends, self.waiters, self.sites
        for k in range(len(ends), len(order)):
            entry = order[k]
            together = entry.members or (entry,)
            made: list[tuple[Result, tuple[int, int]]] = []
            for at in together:
                op, stage, mb, _, _, part, _, _ = at
                needed, left = sites.get((op, stage)) or self._site(at)
                for result in needed:
                    end = result_ends[result].get((mb, part))
                    if end is None:
                        waiters[result].setdefault((mb, part), []).append(rank)
                        return
                    if end > now:
                        now = end
                if left is not None:
                    made.append((left, (mb, part)))
            now += len(together)
            ends.append(now)
            for left, of in made:
                result_ends[left][of] = now
                if waiters[left] and of in waiters[left]:
                    ready += waiters[left].pop(of)

    def _site(self, at: Instruction) -> tuple[tuple[Result, ...], Result | None]:
        left = (RESULT_OF.get(at.op, at.op), at.stage)
        site = self.sites[(at.op, at.stage)] = self._needed(at), left if left in self.result_ends else None
        return site

    def _needed(self, at: Instruction) -> tuple[Result, ...]:
        """The results of other stages that ``at`` needs, by a message or a collective."""
        source = source_of(at.op, at.stage, self.num_stages)
        sent = () if source is None else ((RESULT_OF[at.op], source),)
        return (*sent, *collected_inputs(at.op, at.stage, self.placement))

    def _lacks(self, at: Instruction) -> Result | None:
        """The first of them that is not there yet."""
        return next((one for one in self._needed(at) if (at.mb, at.slice) not in self.result_ends[one]), None)

    def _take_apart_pairs(self) -> list[int]:
        """All ranks wait or are done: take apart the pairs whose forward could run by itself; returns their ranks."""
        freed = []
        for rank, order in enumerate(self.orders):
            at = order[len(self.ends[rank])] if len(self.ends[rank]) < len(order) else None
            if at is None or not at.members:
                continue
            if self._lacks(at.members[0]) is None:
                order[len(self.ends[rank]) : len(self.ends[rank]) + 1] = at.members
                freed.append(rank)
        return freed

    def _why_stuck(self, rank: int) -> str:
        entry = self.orders[rank][len(self.ends[rank])]
        blocked, (kind, source) = next(
            (at, needed) for at in entry.members or (entry,) if (needed := self._lacks(at)) is not None
        )
        peer, chunk = self.placement.homes[source]
        done = len(self.ends[peer])
        lacking = blocked._replace(op=kind, chunk=chunk)
        peer_at = self.orders[peer][done].name if done < len(self.orders[peer]) else "the end of its order"
        return (
            f"rank {rank} cannot run {blocked} ({blocked.name}): it needs {lacking} of rank {peer}, which "
            f"is stuck before it, at {peer_at}"
        )

"""The logical clock of a compute order: when each operation would end if every operation took one slot and transfers
took no time. ``advise`` uses it with other times.

Lowering places communication by this clock. Every operation takes whole slots, so all ranks' boundaries are whole
numbers. The end of the producing operation is then a number (the message's *round*) that both ends of a transfer know.
If every rank does its exchanges in the order of rounds they cannot deadlock, because the lowest unfinished round waits
for no other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.agenda import Agenda
from megatron_pp.plan.ir.dataflow import RESULT_OF, Result, source_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, PASS_OPS, Instruction
from megatron_pp.plan.ir.placement import Placement

Time = Any  # an int that counts slots, or the unit of ``took``
Took = Callable[[str, int, int, int], Time]
Ends = dict[Result, dict[tuple[int, int], Time]]  # result -> (microbatch, part) -> when the result exists


class Clocked(NamedTuple):
    """Orders with their times. ``ends[rank][i]``: the slot in which ``orders[rank][i]`` ends (the first ends at 1).

    ``result_ends``: when an output or input gradient exists, and when every rank has run a pass.
    """

    orders: list[list[Instruction]]
    ends: list[list[Time]]
    result_ends: Ends

    def slots(self) -> list[list[Instruction | None]]:
        """``slots[rank][slot]``: the operation that ends there; None if the rank is idle or in the middle of one."""
        count = max((ends[-1] for ends in self.ends if ends), default=0)
        rows = []
        for order, ends in zip(self.orders, self.ends, strict=True):
            at_end = dict(zip(ends, order, strict=True))
            rows.append([at_end.get(slot) for slot in range(1, count + 1)])
        return rows


def run_clock(
    orders: Sequence[Sequence[Instruction]], placement: Placement, took: Took = lambda *_: 1, transfer: Time = 0
) -> Clocked:
    """Give all operations of orders their times.

    ``took``: the time of an operation, by op, stage, microbatch and part. ``transfer``: the time of a message from one
    rank to another, which never waits for its link. Joined operations take the time of all and end together; they are
    taken apart if they would wait in a circle and would not do so singly. Raises PlanError, which names both, if an
    operation waits for one that never comes before it.
    """
    return _Clock(orders, placement, took, transfer).run()


_Waiters = dict[tuple[int, int], list[int]]  # (microbatch, part) -> ranks that wait for it
# The stage of an operation. For each result that it needs from other stages, and for its own: the ends, the ranks that
# wait for them, and the time of the transfer.
_Made = tuple[dict[tuple[int, int], Time], _Waiters]
_Site = tuple[int, list[tuple[_Made, Time]], _Made | None]


class _Clock:
    """All ranks' orders, run against each other."""

    def __init__(
        self, orders: Sequence[Sequence[Instruction]], placement: Placement, took: Took, transfer: Time
    ) -> None:
        self.orders = [list(order) for order in orders]
        self.placement = placement
        self.took = took
        self.transfer = transfer
        self.ends: list[list[Time]] = [[] for _ in orders]
        stages = range(placement.num_stages)
        self.result_ends: Ends = {(op, s): {} for op in (FORWARD, BACKWARD) for s in stages}
        self.result_ends |= {(op, s): {} for op in PASS_OPS for s in stages if placement.barriers}
        self.made: dict[Result, _Made] = {result: (ends, {}) for result, ends in self.result_ends.items()}
        self.sites: list[dict[tuple[str, int], _Site]] = [{} for _ in orders]  # for each rank: (op, chunk) -> site
        self.agenda = Agenda(range(len(orders)))

    def run(self) -> Clocked:
        self.agenda.run(self._advance)
        while self._take_apart():
            self.agenda.run(self._advance)
        for rank, order in enumerate(self.orders):
            if len(self.ends[rank]) < len(order):
                raise PlanError(self._why_stuck(rank))
        return Clocked(self.orders, self.ends, self.result_ends)

    def _advance(self, rank: int, _: float) -> None:
        """Run ``rank`` until it has to wait for another one. Wakes ranks that waited for its results."""
        order, ends, sites = self.orders[rank], self.ends[rank], self.sites[rank]
        took = self.took
        now = ends[-1] if ends else 0
        for k in range(len(ends), len(order)):
            entry = order[k]
            duration = 0
            made: list[tuple[_Made, tuple[int, int]]] = []
            for op, _stage, mb, _peer, chunk, part, _tensor, _members in entry.members or (entry,):
                stage, needed, left = sites.get((op, chunk)) or self._site(rank, op, chunk)
                of = mb, part
                for (result_ends, waiters), travels in needed:
                    end = result_ends.get(of)
                    if end is None:
                        waiters.setdefault(of, []).append(rank)
                        return
                    if end + travels > now:
                        now = end + travels
                duration += took(op, stage, mb, part)
                if left is not None:
                    made.append((left, of))
            now += duration
            ends.append(now)
            for (result_ends, waiters), of in made:
                result_ends[of] = now
                if of in waiters:
                    for other in waiters.pop(of):
                        self.agenda.plan(other, 0)

    def _site(self, rank: int, op: str, chunk: int) -> _Site:
        stage, homes = self.placement.stages[rank][chunk], self.placement.homes
        needed = [
            (self.made[result], 0 if homes[result[1]][0] == rank else self.transfer)
            for result in self._needed(op, stage)
        ]
        left = self.made.get((RESULT_OF.get(op, op), stage))
        return self.sites[rank].setdefault((op, chunk), (stage, needed, left))

    def _needed(self, op: str, stage: int) -> tuple[Result, ...]:
        """The results of other stages that an operation needs, by a message or a collective."""
        source = source_of(op, stage, self.placement.num_stages)
        sent = () if source is None else ((RESULT_OF[op], source),)
        return (*sent, *self.placement.collected_inputs(op, stage))

    def _lacks(self, rank: int, at: Instruction) -> Result | None:
        """The first result that ``at`` needs and that does not exist yet."""
        needed = self._needed(at.op, self.placement.stages[rank][at.chunk])
        return next((one for one in needed if (at.mb, at.part) not in self.result_ends[one]), None)

    def _take_apart(self) -> bool:
        """Take apart joined operations whose first could run, once all ranks wait or are done. Returns whether any."""
        found = False
        for rank, order in enumerate(self.orders):
            done = len(self.ends[rank])
            at = order[done] if done < len(order) else None
            if at is not None and at.members and self._lacks(rank, at.members[0]) is None:
                order[done : done + 1] = at.members
                self.agenda.plan(rank, 0)
                found = True
        return found

    def _why_stuck(self, rank: int) -> str:
        entry = self.orders[rank][len(self.ends[rank])]
        blocked, (kind, source) = next(
            (at, needed) for at in entry.members or (entry,) if (needed := self._lacks(rank, at)) is not None
        )
        peer, chunk = self.placement.homes[source]
        done = len(self.ends[peer])
        lacking = blocked._replace(op=kind, chunk=chunk)
        peer_at = self.orders[peer][done].name if done < len(self.orders[peer]) else "the end of its order"
        return (
            f"rank {rank} cannot run {blocked} ({blocked.name}): it needs {lacking} of rank {peer}, which "
            f"is stuck before it, at {peer_at}"
        )

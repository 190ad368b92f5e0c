"""Put a plan on the clock: compute takes what its stage takes, transfers what their link takes, all else is free.

Transfers follow the rules of ``rendezvous.py`` (``fabric.py`` has them with time): a WAIT or RELEASE holds its rank
until the transfer is over, while what was posted before goes on; a hand-off between chunks of one rank costs nothing.
Events are worked off in the order of time, so the cost grows with the number of instructions, times the logarithm of
the number of ranks.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.costs import FREE, Network, StageCosts
from megatron_pp.plan.fabric import Announcement, Entry, Fabric
from megatron_pp.plan.instruction import Instruction
from megatron_pp.plan.rendezvous import check_rendezvous
from megatron_pp.plan.simulation import Simulation, Transfer, TransferLog, Waits
from megatron_pp.plan.spec import Plan, PlanError

_Arrival = tuple[Transfer, Entry, Entry]  # a transfer that is over, and what was posted for it at both ends

_POSTED_BY = {
    ins.WAIT_ACT: ins.RECV_ACT,
    ins.WAIT_GRAD: ins.RECV_GRAD,
    ins.RELEASE_ACT: ins.SEND_ACT,
    ins.RELEASE_GRAD: ins.SEND_GRAD,
}


def simulate(plan: Plan, costs: StageCosts, network: Network = FREE) -> Simulation:
    """One step of ``plan``: when each instruction of each rank starts and ends, from time 0, in the unit of ``costs``.

    Raises PlanError where the costs are not for the plan's stages, and where the plan hangs.
    """
    if costs.num_stages != plan.placement.num_stages:
        raise PlanError(f"costs are given for {costs.num_stages} stages; the plan has {plan.placement.num_stages}")
    return _Run(plan, costs, network).run()


class _Rank:
    """One rank on the clock: how far it is, and what it waits for."""

    def __init__(self, plan: Plan, costs: StageCosts, rank: int) -> None:
        stages = plan.placement.stages[rank]
        self.number = rank
        self.program = plan.programs[rank]
        self.starts = array("d")
        self.ends = array("d")
        self.busy = 0.0
        self.waits = Waits()
        self.posted: dict[tuple[str, int, int], Entry] = {}
        self.awaited: Entry | None = None
        self._split = {(i.chunk, i.mb) for i in self.program if i.op == ins.WEIGHT}
        self._whole = {op: [costs.of(op, s, split=False) for s in stages] for op in ins.COMPUTE_OPS}
        self._half = [costs.backward_input[s] for s in stages]

    @property
    def is_done(self) -> bool:
        return len(self.ends) == len(self.program)

    def time_of(self, at: Instruction) -> float:
        """How long a compute operation takes."""
        if at.op == ins.BACKWARD and (at.chunk, at.mb) in self._split:
            return self._half[at.chunk]
        return self._whole[at.op][at.chunk]

    def end_wait(self, entry: Entry, now: float) -> None:
        """The current instruction waited until ``now`` for ``entry``; put the time down to its cause."""
        since = self.starts[-1]
        at = self.program[len(self.ends)]
        if at.op in ins.RELEASE_OPS:
            self.waits.release += now - since
        elif entry.last is not None:
            self.waits.add_receive(since, now, entry.last)


class _Run:
    """The event loop: a rank runs until it computes or has to wait; a transfer until it is there."""

    def __init__(self, plan: Plan, costs: StageCosts, network: Network) -> None:
        self.plan = plan
        self.fabric = Fabric(plan, network)
        self.late_receives = plan.spec.variable_shapes  # as in rendezvous.py: its WAIT posts such a receive in full
        self.ranks = [_Rank(plan, costs, r) for r in range(len(plan.programs))]
        self.log = TransferLog()
        self.agenda: list[tuple[float, int, _Rank | _Arrival | Announcement]] = []
        self.planned = 0  # breaks ties: of two events at one time, the one planned first happens first

    def run(self) -> Simulation:
        for rank in self.ranks:
            self._plan_event(0.0, rank)
        while self.agenda:
            now, _, what = heappop(self.agenda)
            if isinstance(what, _Rank):
                self._advance(what, now)
            elif isinstance(what, tuple):
                self._arrive(now, *what)
            else:
                self.fabric.hear(what, now)
                self._plan_network_events()
        if not all(rank.is_done for rank in self.ranks):
            check_rendezvous(self.plan)  # says in words who waits for whom
            raise PlanError("the plan comes to a stop before its end")
        return Simulation(
            self.plan,
            tuple(rank.starts for rank in self.ranks),
            tuple(rank.ends for rank in self.ranks),
            self.log,
            tuple(rank.waits for rank in self.ranks),
            tuple(rank.busy for rank in self.ranks),
        )

    def _plan_event(self, when: float, what: _Rank | _Arrival | Announcement) -> None:
        self.planned += 1
        heappush(self.agenda, (when, self.planned, what))

    def _advance(self, rank: _Rank, now: float) -> None:
        """Run ``rank`` until it computes (it comes back when that is over) or has to wait."""
        for i in range(len(rank.ends), len(rank.program)):
            at = rank.program[i]
            op = at.op
            rank.starts.append(now)
            if op in ins.COMPUTE_OPS:
                took = rank.time_of(at)
                rank.busy += took
                rank.ends.append(now + took)
                self._plan_event(now + took, rank)
                return
            if op in ins.WAIT_OPS or op in ins.RELEASE_OPS:
                entry = self._entry_of(rank, at, now)
                if entry.left:
                    rank.awaited = entry
                    return
            elif op == ins.BATCH or op in ins.SEND_OPS or (op in ins.RECV_OPS and not self.late_receives):
                self._post(rank, at, now)
            rank.ends.append(now)

    def _entry_of(self, rank: _Rank, at: Instruction, now: float) -> Entry:
        """What a WAIT or RELEASE waits for."""
        key = (_POSTED_BY[at.op], at.chunk, at.mb)
        if self.late_receives and at.op in ins.WAIT_OPS and key not in rank.posted:
            self._post(rank, ins.instruction(*key), now)
        entry = rank.posted.pop(key, None)
        if entry is None:
            raise PlanError(f"rank {rank.number}: {at} ({at.name}) waits for what was never posted")
        return entry

    def _post(self, rank: _Rank, at: Instruction, now: float) -> None:
        entry = self.fabric.post(rank.number, at, now)
        for one in at.members or (at,):
            rank.posted[(one.op, one.chunk, one.mb)] = entry
        self._plan_network_events()

    def _plan_network_events(self) -> None:
        """What the network will do of itself because of what was just posted or has just ended."""
        for arrival in self.fabric.started:
            self.log.append(arrival[0])
            self._plan_event(arrival[0].end, arrival)
        self.fabric.started.clear()
        for when, announcement in self.fabric.announced:
            self._plan_event(when, announcement)
        self.fabric.announced.clear()

    def _arrive(self, now: float, transfer: Transfer, send: Entry, receive: Entry) -> None:
        """A transfer is over: wake the ranks that waited for it."""
        for entry in self.fabric.finish(transfer, (send, receive), now):
            rank = self.ranks[entry.rank]
            if rank.awaited is entry:
                rank.awaited = None
                rank.end_wait(entry, now)
                rank.ends.append(now)
                self._plan_event(now, rank)
        self._plan_network_events()

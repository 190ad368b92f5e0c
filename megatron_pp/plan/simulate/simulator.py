"""Simulate a plan: compute takes the time of its stage, transfers that of their link, everything else is free.

Transfers and the rules of the device are those of ``device_ranks.py``, the network's times those of
``network_model.py``; a hand-off between chunks of one rank costs nothing. Copies between device and host take turns on
an engine for each direction and rank.
Events are processed in the order of time, so the cost grows with the number of instructions times the logarithm of
the number of ranks.
"""

from array import array
from collections.abc import Collection, Iterator
from operator import itemgetter

from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import FREE, Network, StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import Message, message_of
from megatron_pp.plan.ir.instruction import POST_OF, Instruction, operations
from megatron_pp.plan.ir.spec import STATIC_BUFFERS, Plan, checked_device
from megatron_pp.plan.simulate.network_model import Arrival, TimedQueues
from megatron_pp.plan.simulate.simulation import Event, Simulation, TransferLog, Waits
from megatron_pp.plan.verify.device_ranks import DeviceRanks
from megatron_pp.plan.verify.queues import End, Entry, Meeting
from megatron_pp.plan.verify.rendezvous import check_rendezvous


@collector_paused()
def simulate(plan: Plan, costs: StageCosts, network: Network = FREE, device: Collection[str] = ()) -> Simulation:
    """One step of ``plan``: when each instruction of each rank starts and ends, from time 0, in the unit of ``costs``.

    ``device``: rules of the device, out of DEVICE_RULES. ONE_QUEUE holds a rank that posts behind an unfinished
    transfer. DEVICE_SYNC holds it at the end of each operation until all that it has posted is over. Under ANY_WAIT
    nothing waits for the device. Raises PlanError if the costs are not for the plan's stages, if the plan hangs, and
    for rules other than STATIC_BUFFERS on gloo, which has no device.
    """
    rules = checked_device(device)
    if network.gloo and rules and rules != (STATIC_BUFFERS,):
        raise PlanError(f"{' and '.join(rules)}: gloo's transfers wait for no device; leave the rule or gloo out")
    if costs.num_stages != plan.placement.num_stages:
        raise PlanError(f"costs are given for {costs.num_stages} stages; the plan has {plan.placement.num_stages}")
    return _SimulatedRun(plan, costs.placed(plan.placement), network, rules).run()


class _CopyEngines:
    """Of a rank, one for each direction between device and host: each makes a copy at a time, in the order posted."""

    def __init__(self, costs: StageCosts, shares: tuple[float, ...]) -> None:
        self.made: list[Event] = []
        self._costs = costs
        self._shares = shares  # of each slice
        self._posted: dict[tuple[str, int, int, int], Event] = {}
        self._free_at: dict[str, float] = {}  # by op

    def post(self, at: Instruction, now: float) -> Event:
        """The copy that ``at`` posts: it begins once those posted before it in its direction are over."""
        start = max(now, self._free_at.get(at.op, now))
        copy = Event(at, start, start + self._costs.of(at.op, at.stage) * self._shares[at.part])
        self._free_at[at.op] = copy.end
        self._posted[(at.op, at.stage, at.mb, at.part)] = copy
        self.made.append(copy)
        return copy

    def end_of(self, at: Instruction) -> float:
        """When the copy is over that ``at`` waits for."""
        return self._posted.pop((ins.COPY_OF[at.op], at.stage, at.mb, at.part)).end

    @property
    def idle_from(self) -> float:
        """When all that was posted is over."""
        return max(self._free_at.values(), default=0.0)


class _SimulatedRank:
    """What is recorded of one rank, and what it has posted."""

    def __init__(self, number: int, copies: _CopyEngines) -> None:
        self.number = number
        self.copies = copies
        self.starts = array("d")
        self.ends = array("d")
        self.busy = 0.0
        self.waits = Waits()
        self.posted: dict[Message, Entry] = {}

    def note(self, start: float, end: float) -> None:
        self.starts.append(start)
        self.ends.append(end)

    def add_wait(self, op: str, since: float, now: float, entry: Entry) -> None:
        """The rank waited in a ``op`` until ``now`` for ``entry``; put the time down to its cause."""
        if op in ins.FREE_OPS:
            self.waits.release += now - since
        elif entry.last is not None:
            self.waits.add_receive(since, now, entry.last)


class _SimulatedRun(DeviceRanks):
    """With time: a rank is busy while it computes, and a transfer is over when it is there."""

    queues: TimedQueues

    def __init__(self, plan: Plan, costs: StageCosts, network: Network, rules: Collection[str]) -> None:
        super().__init__(plan, TimedQueues(plan, network, costs), rules)
        self.costs = costs
        self.shares = costs.of_parts(plan.spec.num_parts)  # of a whole sequence there is one, at the index NONE
        self.of_mb = costs.of_microbatches(plan.spec.num_microbatches)
        self.posts = {ins.BATCH} | ins.SEND_OPS | ins.COLLECTIVE_POSTS
        self.posts |= set() if self.late_receives else ins.RECV_OPS  # the WAIT posts a late receive
        self.ranks = [_SimulatedRank(r, _CopyEngines(costs, self.shares)) for r in range(len(plan.programs))]
        self.log = TransferLog()

    def run(self) -> Simulation:
        for rank in range(len(self.ranks)):
            self.agenda.plan(rank, 0.0)
        self.agenda.run(self._happen)
        if self.blocked:
            check_rendezvous(self.plan, self.rules)  # names the cycle
            raise PlanError("the plan stops before its end")
        return Simulation(
            self.plan,
            tuple(rank.starts for rank in self.ranks),
            tuple(rank.ends for rank in self.ranks),
            self.log,
            tuple(rank.waits for rank in self.ranks),
            tuple(rank.busy for rank in self.ranks),
            tuple(tuple(rank.copies.made) for rank in self.ranks),
        )

    def _happen(self, what: int | Arrival | End, now: float) -> None:
        if isinstance(what, int):
            self.resume(what, now)
            return
        if isinstance(what, Arrival):
            for entry in self.queues.arrive(what, now):
                self.complete(entry, now)
        else:
            self.queues.announce(what, now)
        self._plan_network_events()

    def program(self, rank: int) -> Iterator[Entry | float]:
        me, now, one_queue = self.ranks[rank], 0.0, self.one_queue
        for at in self.plan.programs[rank]:
            op = at.op
            if op in ins.COMPUTE_OPS:
                if len(at.members) > 2:
                    yield from self._pair(me, at)
                else:
                    yield self._compute(me, at)
                if self.device_sync:
                    yield from self._synchronise(me)
                now = self.now
                continue
            me.starts.append(now)
            if op in POST_OF:
                entry = self._awaited(me, at)
                if entry.left:
                    yield entry
                    me.add_wait(op, now, self.now, entry)
                    now = self.now
            elif op in self.posts:
                entry = self._post(me, at)
                if one_queue and (held := self.in_front_of(entry)) is not None:
                    yield held
                    me.waits.queued += self.now - now
                    now = self.now
            elif op in ins.COPY_OPS and (until := self._copy(me, at)) > now:
                yield until
                now = until
            me.ends.append(now)

    def _compute(self, me: _SimulatedRank, at: Instruction) -> float:
        """Returns when it is over."""
        end = self.now
        for one in at.members or (at,):
            took = self._time(one)
            me.note(end, end + took)
            me.busy += took
            end += took
        return end

    def _time(self, one: Instruction) -> float:
        return self.costs.of(one.op, one.stage) * self.shares[one.part] * self.of_mb[one.mb]

    def _synchronise(self, me: _SimulatedRank) -> Iterator[Entry | float]:
        """The operation that is over lasts until all that the rank has posted is over."""
        while unfinished := self.unfinished(me.number):
            entry, since = unfinished[0], me.ends[-1]
            yield entry
            me.add_wait(ins.FREE_F if entry.at.op in ins.SEND_OPS else ins.WAIT_F, since, self.now, entry)
            me.ends[-1] = self.now
        idle_from = me.copies.idle_from
        if idle_from > self.now:
            me.waits.copy += idle_from - self.now
            me.ends[-1] = idle_from
            yield idle_from

    def _pair(self, me: _SimulatedRank, at: Instruction) -> Iterator[Entry | float]:
        """Joined operations with sends in them: they take what all take, and each send has its share of that time."""
        whole = sum(map(self._time, operations(at)))
        begun = now = self.now
        sends: list[tuple[float, int, Instruction]] = []  # when each goes out, and its index in the rank's times
        backward = 0  # its index
        for one in at.members:
            if one.op in ins.SEND_OPS:
                sends.append((begun + self.costs.pair_sends[one.op == ins.SEND_B] * whole, len(me.starts), one))
                me.note(now, now)
                continue
            took = self._time(one)
            backward = len(me.starts)
            me.note(now, now + took)
            now += took
        me.busy += whole
        delay = 0.0
        for due, index, one in sorted(sends, key=itemgetter(0)):
            if due + delay > self.now:
                yield due + delay
            me.starts[index] = me.ends[index] = since = self.now
            held = self.in_front_of(self._post(me, one))
            if held is not None:
                yield held
                delay += self.now - since
                me.ends[backward] += self.now - since
                me.waits.queued += self.now - since
        if begun + whole + delay > self.now:
            yield begun + whole + delay

    def _copy(self, me: _SimulatedRank, at: Instruction) -> float:
        """Post a copy, or wait for one. Returns until when that holds the rank."""
        now = self.now
        if at.op in ins.COPY_POST_OPS:
            begun = me.copies.post(at, now).start
            until = begun if self.one_queue else now
            me.waits.queued += until - now
        else:
            until = max(now, me.copies.end_of(at))
            me.waits.copy += until - now
        return until

    def _awaited(self, me: _SimulatedRank, at: Instruction) -> Entry:
        """What a WAIT or FREE waits for."""
        message = message_of(at)
        if self.late_receives and at.op in ins.WAIT_OPS and message not in me.posted:
            self._post(me, at._replace(op=POST_OF[at.op]))
        entry = me.posted.pop(message, None)
        if entry is None:
            raise PlanError(f"rank {me.number}: {at} ({at.name}) waits for a transfer that was never posted")
        return entry

    def _post(self, me: _SimulatedRank, at: Instruction) -> Entry:
        entry = self.queues.send_off(me.number, at, self.now)
        for end in entry.ends:
            me.posted[end.message] = entry
        self.opened(me.number, entry)
        self._plan_network_events()
        return entry

    def _plan_network_events(self) -> None:
        """What the network will do of itself because of what was just posted or has just ended."""
        for arrival in self.queues.started:
            moved, first = arrival.transfer, next(iter(arrival.meeting))
            if isinstance(arrival.meeting, Meeting):
                self.log.append(moved)
            elif first.at.op in ins.REPLICA_POSTS:  # other collectives go over no link of their own
                self.ranks[moved.source].copies.made.append(Event(first.at, moved.start, moved.end))
            self.agenda.plan(arrival, arrival.transfer.end)
        self.queues.started.clear()
        for when, receive in self.queues.announced:
            self.agenda.plan(receive, when)
        self.queues.announced.clear()

"""Put a plan on the clock: compute takes what its stage takes, transfers what their link takes, all else is free.

Transfers follow the rules of ``rendezvous.py`` (``network_model.py`` has them with time): a WAIT or FREE holds its rank
until the transfer is over, while what was posted before goes on; a hand-off between chunks of one rank costs nothing.
Copies between device and host take turns on an engine for each direction and rank.
The rules of the device, where any are given, hold a rank in other instructions too, as in ``rendezvous.py``.
Events are worked off in the order of time, so the cost grows with the number of instructions, times the logarithm of
the number of ranks.
"""

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import FREE, Network, StageCosts
from megatron_pp.plan.gc_pause import collector_paused
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import Message, message_of
from megatron_pp.plan.ir.instruction import POST_OF, Instruction, halves
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_QUEUE, Plan, checked_device
from megatron_pp.plan.simulate.network_model import Arrival, TimedQueues
from megatron_pp.plan.simulate.simulation import Event, Simulation, TransferLog, Waits
from megatron_pp.plan.verify.queues import End, Entry, Meeting
from megatron_pp.plan.verify.rendezvous import check_rendezvous


@collector_paused()
def simulate(plan: Plan, costs: StageCosts, network: Network = FREE, device: Collection[str] = ()) -> Simulation:
    """One step of ``plan``: when each instruction of each rank starts and ends, from time 0, in the unit of ``costs``.

    ``device``: the rules of the device, of DEVICE_RULES: ONE_QUEUE holds a rank where it posts behind an unfinished
    transfer, DEVICE_SYNC at the end of each operation until all that it has posted is over. Raises PlanError where the
    costs are not for the plan's stages, where the plan hangs, and for these two on gloo, which has no device.
    """
    rules = checked_device(device)
    if network.gloo and (ONE_QUEUE in rules or DEVICE_SYNC in rules):
        raise PlanError(f"{' and '.join(rules)}: gloo's transfers wait for no device; leave the rule or gloo out")
    if costs.num_stages != plan.placement.num_stages:
        raise PlanError(f"costs are given for {costs.num_stages} stages; the plan has {plan.placement.num_stages}")
    return _Run(plan, costs.placed(plan.placement), network, rules).run()


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
        copy = Event(at, start, start + self._costs.of(at.op, at.stage) * self._shares[at.slice])
        self._free_at[at.op] = copy.end
        self._posted[(at.op, at.stage, at.mb, at.slice)] = copy
        self.made.append(copy)
        return copy

    def end_of(self, at: Instruction) -> float:
        """When the copy is over that ``at`` waits for."""
        return self._posted.pop((ins.COPY_OF[at.op], at.stage, at.mb, at.slice)).end

    @property
    def idle_from(self) -> float:
        """When all that was posted is over."""
        return max(self._free_at.values(), default=0.0)


@dataclass(slots=True)
class _PairRest:
    """Of a pair that runs: the sends in it that have not gone out (when each does, and its index in the rank's times),
    the index of its backward, and when it is over.
    """

    sends: list[tuple[float, int, Instruction]] = field(default_factory=list)
    backward: int = 0
    end: float = 0.0
    held_since: float = 0.0

    def delay(self, time: float) -> None:
        self.sends = [(when + time, index, at) for when, index, at in self.sends]
        self.end += time


class _Rank:
    """One rank on the clock: how far it is, and what it waits for."""

    def __init__(self, plan: Plan, rank: int, copies: _CopyEngines) -> None:
        self.number = rank
        self.program = plan.programs[rank]
        self.copies = copies
        self.next = 0
        self.starts = array("d")
        self.ends = array("d")
        self.busy = 0.0
        self.waits = Waits()
        self.posted: dict[Message, Entry] = {}
        self.awaited: Entry | None = None
        self.open: list[Entry] = []  # posted, and unfinished when last looked at
        self.is_syncing = False  # its operation is over, and it waits for all that is open
        self.pair: _PairRest | None = None  # a pair with sends in it, while it runs

    @property
    def is_done(self) -> bool:
        return self.next == len(self.program) and not self.is_syncing and self.pair is None

    def note(self, start: float, end: float) -> None:
        self.starts.append(start)
        self.ends.append(end)

    def end_wait(self, entry: Entry, now: float) -> None:
        """The rank waited until ``now`` for ``entry``; put the time down to its cause."""
        if self.pair is not None:
            held = now - self.pair.held_since
            self.pair.delay(held)
            self.ends[self.pair.backward] += held
            self.waits.queued += held
            return
        if self.is_syncing:
            since, self.ends[-1] = self.ends[-1], now
            op = ins.FREE_F if entry.at.op in ins.SEND_OPS else ins.WAIT_F
        else:
            since, op = self.starts[-1], self.program[self.next].op
            self.ends.append(now)
            self.next += 1
        if op in ins.FREE_OPS:
            self.waits.release += now - since
        elif op not in ins.WAIT_OPS | ins.COLLECTIVE_WAITS:  # a post, held back by what is in front of it
            self.waits.queued += now - since
        elif entry.last is not None:
            self.waits.add_receive(since, now, entry.last)

    def unfinished(self) -> Entry | None:
        """The oldest transfer that is not over."""
        self.open = [entry for entry in self.open if entry.left]
        return next(iter(self.open), None)


class _Run:
    """The event loop: a rank runs until it computes or has to wait; a transfer until it is there."""

    def __init__(self, plan: Plan, costs: StageCosts, network: Network, rules: Collection[str]) -> None:
        self.plan = plan
        self.costs = costs
        self.shares = costs.of_slices(plan.spec.slices)  # of a whole sequence there is one, at the index NONE
        self.of_mb = costs.of_microbatches(plan.spec.num_microbatches)
        self.rules = rules
        self.one_queue = ONE_QUEUE in rules
        self.device_sync = DEVICE_SYNC in rules
        self.queues = TimedQueues(plan, network)
        self.late_receives = plan.spec.variable_shapes  # as in rendezvous.py: its WAIT posts such a receive in full
        self.posts = {ins.BATCH} | ins.SEND_OPS | ins.COLLECTIVE_POSTS
        self.posts |= set() if self.late_receives else ins.RECV_OPS
        self.ranks = [_Rank(plan, r, _CopyEngines(costs, self.shares)) for r in range(len(plan.programs))]
        self.log = TransferLog()
        self.agenda: list[tuple[float, int, _Rank | Arrival | End]] = []
        self.planned = 0  # breaks ties: of two events at one time, the one planned first happens first

    def run(self) -> Simulation:
        for rank in self.ranks:
            self._plan_event(0.0, rank)
        while self.agenda:
            now, _, what = heappop(self.agenda)
            if isinstance(what, _Rank):
                self._advance(what, now)
            elif isinstance(what, Arrival):
                self._arrive(now, what)
            else:
                self.queues.announce(what, now)
                self._plan_network_events()
        if not all(rank.is_done for rank in self.ranks):
            check_rendezvous(self.plan, self.rules)  # names the cycle
            raise PlanError("the plan comes to a stop before its end")
        return Simulation(
            self.plan,
            tuple(rank.starts for rank in self.ranks),
            tuple(rank.ends for rank in self.ranks),
            self.log,
            tuple(rank.waits for rank in self.ranks),
            tuple(rank.busy for rank in self.ranks),
            tuple(tuple(rank.copies.made) for rank in self.ranks),
        )

    def _plan_event(self, when: float, what: _Rank | Arrival | End) -> None:
        self.planned += 1
        heappush(self.agenda, (when, self.planned, what))

    def _advance(self, rank: _Rank, now: float) -> None:
        """Run ``rank`` until it computes (it comes back when that is over) or has to wait."""
        if rank.pair is not None and not self._go_on(rank, rank.pair, now):
            return
        if rank.is_syncing:
            rank.awaited = rank.unfinished()
            if rank.awaited is not None or self._syncs_with_copies(rank, now):
                return
            rank.is_syncing = False
        program = rank.program
        while rank.next < len(program):
            at = program[rank.next]
            op = at.op
            if op in ins.COMPUTE_OPS:
                self._compute(rank, at, now)
                return
            if op in POST_OF:
                entry = self._awaited(rank, at, now)
                if entry.left:
                    rank.starts.append(now)
                    rank.awaited = entry
                    return
            elif op in self.posts:
                entry = self._post(rank, at, now)
                if self.one_queue and entry.queue[0] is not entry:
                    rank.starts.append(now)
                    rank.awaited = entry.queue[-2]
                    return
            elif op in ins.COPY_OPS and (until := self._copy(rank, at, now)) > now:
                rank.note(now, until)
                rank.next += 1
                self._plan_event(until, rank)
                return
            rank.note(now, now)
            rank.next += 1

    def _copy(self, rank: _Rank, at: Instruction, now: float) -> float:
        """Post a copy, or wait for one. Returns until when that holds the rank."""
        if at.op in ins.COPY_POST_OPS:
            begun = rank.copies.post(at, now).start
            until = begun if self.one_queue else now
            rank.waits.queued += until - now
        else:
            until = max(now, rank.copies.end_of(at))
            rank.waits.copy += until - now
        return until

    def _syncs_with_copies(self, rank: _Rank, now: float) -> bool:
        """Whether a rank that synchronises the device waits for its copies; then until they are over."""
        until = rank.copies.idle_from
        if until <= now:
            return False
        rank.ends[-1] = until
        rank.waits.copy += until - now
        self._plan_event(until, rank)
        return True

    def _compute(self, rank: _Rank, at: Instruction, now: float) -> None:
        rank.next += 1
        if len(at.members) > 2:
            self._start_pair(rank, at, now)
            return
        for one in at.members or (at,):
            took = self.costs.of(one.op, one.stage) * self.shares[one.slice] * self.of_mb[one.mb]
            rank.note(now, now + took)
            rank.busy += took
            now += took
        rank.is_syncing = self.device_sync
        self._plan_event(now, rank)

    def _start_pair(self, rank: _Rank, at: Instruction, now: float) -> None:
        """A pair with sends in it: its halves take what both take, and each send has its share of that time."""
        whole = sum(self.costs.of(half.op, half.stage) * self.of_mb[half.mb] for half in halves(at))
        pair, begun = _PairRest(), now
        for one in at.members:
            if one.op in ins.SEND_OPS:
                share = self.costs.pair_sends[one.op == ins.SEND_B]
                pair.sends.append((begun + share * whole, len(rank.starts), one))
                rank.note(now, now)
                continue
            took = self.costs.of(one.op, one.stage) * self.of_mb[one.mb]
            pair.backward = len(rank.starts)
            rank.note(now, now + took)
            now += took
        rank.busy += whole
        pair.end = begun + whole
        pair.sends.sort(key=itemgetter(0))
        rank.pair = pair
        self._go_on(rank, pair, begun)

    def _go_on(self, rank: _Rank, pair: _PairRest, now: float) -> bool:
        """Send what is due of a pair. Returns whether the pair is over."""
        while pair.sends and pair.sends[0][0] <= now:
            _, index, at = pair.sends.pop(0)
            entry = self._post(rank, at, now)
            rank.starts[index] = rank.ends[index] = now
            if self.one_queue and entry.queue[0] is not entry:
                rank.awaited, pair.held_since = entry.queue[-2], now
                return False
        if pair.sends or now < pair.end:
            self._plan_event(pair.sends[0][0] if pair.sends else pair.end, rank)
            return False
        rank.pair, rank.is_syncing = None, self.device_sync
        return True

    def _awaited(self, rank: _Rank, at: Instruction, now: float) -> Entry:
        """What a WAIT or FREE waits for."""
        message = message_of(at)
        if self.late_receives and at.op in ins.WAIT_OPS and message not in rank.posted:
            self._post(rank, at._replace(op=POST_OF[at.op]), now)
        entry = rank.posted.pop(message, None)
        if entry is None:
            raise PlanError(f"rank {rank.number}: {at} ({at.name}) waits for what was never posted")
        return entry

    def _post(self, rank: _Rank, at: Instruction, now: float) -> Entry:
        entry = self.queues.send_off(rank.number, at, now)
        for end in entry.ends:
            rank.posted[end.message] = entry
        if self.device_sync:
            rank.open.append(entry)
        self._plan_network_events()
        return entry

    def _plan_network_events(self) -> None:
        """What the network will do of itself because of what was just posted or has just ended."""
        for arrival in self.queues.started:
            if isinstance(arrival.meeting, Meeting):  # collectives go over no link of their own
                self.log.append(arrival.transfer)
            self._plan_event(arrival.transfer.end, arrival)
        self.queues.started.clear()
        for when, receive in self.queues.announced:
            self._plan_event(when, receive)
        self.queues.announced.clear()

    def _arrive(self, now: float, arrival: Arrival) -> None:
        """A transfer is over: wake the ranks that waited for it."""
        for entry in self.queues.arrive(arrival, now):
            rank = self.ranks[entry.rank]
            if rank.awaited is entry:
                rank.awaited = None
                rank.end_wait(entry, now)
                self._plan_event(now, rank)
        self._plan_network_events()

"""Simulate a plan: compute takes the time of its stage, transfers that of their link, everything else is free.

Transfers and the rules of the device are those of ``device_ranks.py``, the network's times those of
``network_model.py``; a hand-off between chunks of one rank costs nothing. Features say what their instructions take
(``charges.py``). Events are processed in the order of time, so the cost grows with the number of instructions times the
logarithm of the number of ranks.
"""

from collections.abc import Collection, Iterator

from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.stage_costs import FREE, Network, StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import message_of
from megatron_pp.plan.ir.instruction import POST_OF, Instruction
from megatron_pp.plan.ir.spec import STATIC_BUFFERS, Plan, checked_device
from megatron_pp.plan.simulate.charges import CHARGED, ChargesByFeature, SimulatedRank
from megatron_pp.plan.simulate.network_model import Arrival, TimedQueues
from megatron_pp.plan.simulate.simulation import Simulation, TransferLog
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
    return SimulatedRun(plan, costs.placed(plan.placement), network, rules).run()


class SimulatedRun(DeviceRanks):
    """With time: a rank is busy while it computes, and a transfer is over when it is there."""

    queues: TimedQueues

    def __init__(self, plan: Plan, costs: StageCosts, network: Network, rules: Collection[str]) -> None:
        self.charges = ChargesByFeature(self)
        super().__init__(plan, TimedQueues(plan, network, self.charges), rules)
        self.costs = costs
        self.network = network
        self.shares = costs.of_parts(plan.spec.num_parts)  # of a whole microbatch there is one, at the index NONE
        self.of_mb = costs.of_microbatches(plan.spec.num_microbatches)
        self.posts = {ins.BATCH} | ins.SEND_OPS | ins.COLLECTIVE_POSTS
        self.posts |= set() if self.late_receives else ins.RECV_OPS  # the WAIT posts a late receive
        self.ranks = [SimulatedRank(rank) for rank in range(len(plan.programs))]
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
            tuple(tuple(rank.beside) for rank in self.ranks),
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
        me = self.ranks[rank]
        now = 0.0
        one_queue = self.one_queue
        for at in self.plan.programs[rank]:
            op = at.op
            if op in ins.COMPUTE_OPS:
                if len(at.members) > 2:
                    yield from self.charges.of(op).joined(me, at)
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
                entry = self.post(me, at)
                if one_queue and (held := self.in_front_of(entry)) is not None:
                    yield held
                    me.waits.queued += self.now - now
                    now = self.now
            elif op in CHARGED:
                yield from self.charges.of(op).reached(me, at)
                now = self.now
            me.ends.append(now)

    def _compute(self, me: SimulatedRank, at: Instruction) -> float:
        """Returns when it is over."""
        end = self.now
        for one in at.members or (at,):
            took = self.time_of(one)
            me.note(end, end + took)
            me.busy += took
            end += took
        return end

    def time_of(self, one: Instruction) -> float:
        """The time of a compute operation."""
        return self.costs.of(one.op, one.stage) * self.shares[one.part] * self.of_mb[one.mb]

    def _synchronise(self, me: SimulatedRank) -> Iterator[Entry | float]:
        """The operation that is over lasts until all that the rank has posted is over."""
        while unfinished := self.unfinished(me.number):
            entry = unfinished[0]
            since = me.ends[-1]
            yield entry
            me.add_wait(ins.FREE_F if entry.at.op in ins.SEND_OPS else ins.WAIT_F, since, self.now, entry)
            me.ends[-1] = self.now
        if me.beside_until > self.now:
            me.waits.copy += me.beside_until - self.now
            me.ends[-1] = me.beside_until
            yield me.beside_until

    def _awaited(self, me: SimulatedRank, at: Instruction) -> Entry:
        """The transfer that a WAIT or FREE waits for."""
        message = message_of(at)
        if self.late_receives and at.op in ins.WAIT_OPS and message not in me.posted:
            self.post(me, at._replace(op=POST_OF[at.op]))
        entry = me.posted.pop(message, None)
        if entry is None:
            raise PlanError(f"rank {me.number}: {at} ({at.name}) waits for a transfer that was never posted")
        return entry

    def post(self, me: SimulatedRank, at: Instruction) -> Entry:
        """``me`` posts a send, a receive, a BATCH or a collective."""
        entry = self.queues.send_off(me.number, at, self.now)
        for end in entry.ends:
            me.posted[end.message] = entry
        if self.device_sync:  # else nothing here waits for the device, and each entry would be kept to the end
            self.opened(me.number, entry)
        self._plan_network_events()
        return entry

    def _plan_network_events(self) -> None:
        """Plan the network's next events, after a transfer was posted or has ended."""
        for arrival in self.queues.started:
            if isinstance(arrival.meeting, Meeting):
                self.log.append(arrival.transfer)
            else:
                self.charges.of(arrival.meeting[0].at.op).began(arrival.meeting, arrival.transfer)
            self.agenda.plan(arrival, arrival.transfer.end)
        self.queues.started.clear()
        for when, receive in self.queues.announced:
            self.agenda.plan(receive, when)
        self.queues.announced.clear()

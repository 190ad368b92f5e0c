"""The queue machine with time: when transfers start and end.

A pair that met takes its turn on the directed link between its ranks; when the transfer is over, both entries lose an
end. On gloo (``Network.gloo``) there are no queues, but a receive becomes active only when its announcement reaches the
sender, behind what is on the wire towards it. Large messages have connections of their own, and their announcements
take no time.
"""

from collections import Counter
from typing import NamedTuple

from megatron_pp.plan.costs.stage_costs import Network
from megatron_pp.plan.costs.transports import GLOO_DETACHED_BYTES
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.simulate.charges import ChargesByFeature
from megatron_pp.plan.simulate.simulation import Transfer
from megatron_pp.plan.verify.queues import Direction, End, Entry, Gathering, Meeting, QueueMachine


class Arrival(NamedTuple):
    """A transfer that is over, and what met for it."""

    transfer: Transfer
    meeting: Meeting | Gathering


class TimedQueues(QueueMachine):
    """All queues, channels and links of a pipeline, with time.

    ``started`` collects arrivals that are certain, ``announced`` (arrival of the announcement, receive), until the
    caller takes them; it gives each back to ``arrive`` or ``announce`` at its time.
    """

    def __init__(self, plan: Plan, network: Network, charges: ChargesByFeature) -> None:
        super().__init__(plan, ordered=not network.gloo)
        self.network = network
        self.charges = charges
        self.parts = plan.spec.num_parts
        size = network.activation_bytes / self.parts
        detached = self.one_way and not plan.spec.variable_shapes and size >= GLOO_DETACHED_BYTES
        self.announces_late = network.gloo and not detached
        self.started: list[Arrival] = []
        self.announced: list[tuple[float, End]] = []
        self._unannounced: Counter[Direction] = Counter()  # receives whose announcement is on its way
        self._wire_free: dict[tuple[int, int], float] = {}

    def send_off(self, rank: int, at: Instruction, now: float) -> Entry:
        """Post a send, a receive or a BATCH at ``now``. Raises PlanError as ``post`` does."""
        entry = self.post(rank, at, now=now)
        self._start_met(now)
        return entry

    def arrive(self, arrival: Arrival, now: float) -> list[Entry]:
        """The transfer is over. Returns the entries that it completed; those behind them may have started."""
        complete = []
        for end in arrival.meeting:
            if self.finish(end, now):
                end.entry.last = arrival.transfer
                complete.append(end.entry)
        self._start_met(now)
        return complete

    def announce(self, receive: End, now: float) -> None:
        """The announcement has reached the sender; the transfer may have started."""
        self._unannounced[receive.direction] -= 1
        self.meet(receive)
        self._start_met(now)

    def activate(self, entry: Entry, now: float) -> None:
        """Activate an entry, as every queue machine does. On gloo receives are announced first, in order."""
        for end in entry.ends:
            if end.is_send or not self.announces_late:
                self.meet(end)
                continue
            source, target, _ = end.direction
            reached = max(now, self._wire_free.get((target, source), now))
            if reached > now or self._unannounced[end.direction]:
                self._unannounced[end.direction] += 1
                self.announced.append((reached, end))
            else:
                self.meet(end)

    def _start_met(self, now: float) -> None:
        met, self.met = self.met, []
        for one in met:
            transfer = self._transfer(one, now) if isinstance(one, Meeting) else self._collective(one, now)
            self.started.append(Arrival(transfer, one))

    def _collective(self, ends: Gathering, now: float) -> Transfer:
        """A collective starts when all ranks have posted it, and takes none of the links between two ranks."""
        return self.charges.of(ends[0].at.op).transfer(ends, now)

    def _transfer(self, meeting: Meeting, now: float) -> Transfer:
        send, receive = meeting
        source, target, _ = send.direction
        kind, stage, mb, part, _ = send.message
        link = self.network.between(source, target)
        size = self.network.message_bytes(kind) / self.parts
        start = max(now, self._wire_free.get((source, target), 0.0))
        off_the_wire = self._wire_free[(source, target)] = start + link.wire_time(size)
        posted = (send.entry.posted, receive.entry.posted)
        return Transfer(source, target, kind, stage, mb, size, *posted, now, start, off_the_wire + link.latency, part)

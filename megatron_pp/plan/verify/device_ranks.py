"""Runs the programs of all ranks against each other under the rules of the device: without time in ``rendezvous.py``,
with time in the simulator.

``rendezvous``   A send completes only when the matching receive is posted, and the other way round. Operations on one
                 queue run strictly in the order in which they were posted. A batch is one entry of its queue and leaves
                 it as a whole (``queues.py``). A wait blocks all that follows on its rank, while posted operations go
                 on. A collective is over when every rank has posted it; all ranks post theirs in one order. NCCL does
                 this with large messages, gloo always.
``one_queue``    An operation that is posted behind an unfinished one of its own queue blocks all that follows on its
                 rank, compute included. With CUDA_DEVICE_MAX_CONNECTIONS=1 everything goes through one hardware queue,
                 whose head waits for the stream to which it belongs. Sends within joined operations are posted once
                 an operation has made its result, so they may block the other operations.
``any_wait``     Any instruction may wait for an idle device, and so until everything that its rank has posted is over.
                 Examples: an operation whose kernel is launched for the first time or compiled, an allocation that is
                 tried again, the copy of a tensor to send, the first call of a collective or a library. If a plan runs
                 to its end while all of them wait, it also does so while some of them wait (docs/proofs.md).
``device_sync``  Compute also blocks all that follows on its rank until everything that the rank has posted is over, as
                 ``torch.cuda.synchronize()`` within it does.
"""

from collections.abc import Collection, Iterator
from typing import Any

from megatron_pp.plan.ir.agenda import Agenda
from megatron_pp.plan.ir.spec import ANY_WAIT, DEVICE_SYNC, ONE_QUEUE, Plan
from megatron_pp.plan.verify.queues import Entry, QueueMachine


class DeviceRanks:
    """The base of both runs. A subclass says how a rank runs its program (``program``), and when a transfer is over.

    ``rules``: the rules of the device that hold. ``blocked``: rank -> the entry that it waits for.
    """

    def __init__(self, plan: Plan, queues: QueueMachine, rules: Collection[str]) -> None:
        self.plan = plan
        self.queues = queues
        self.rules = rules
        self.one_queue = ONE_QUEUE in rules
        self.any_wait = ANY_WAIT in rules
        self.device_sync = DEVICE_SYNC in rules
        self.late_receives = plan.spec.variable_shapes  # a receive needs its message's shape first
        self.now = 0.0
        self.blocked: dict[int, Entry] = {}
        self.agenda: Agenda[Any] = Agenda()
        self._open: list[list[Entry]] = [[] for _ in plan.programs]  # posted entries that were unfinished at last look
        self._running = [self.program(rank) for rank in range(len(plan.programs))]

    def program(self, rank: int) -> Iterator[Entry | float | None]:
        """Runs ``rank``'s program. Yields the entry that the rank waits for, the time until which it is busy, or None
        if it pauses.
        """
        raise NotImplementedError

    def resume(self, rank: int, now: float) -> None:
        """Run ``rank`` until it has to wait or is at its end."""
        self.now = now
        what = next(self._running[rank], None)
        if isinstance(what, Entry):
            self.blocked[rank] = what
        elif what is not None:
            self.agenda.plan(rank, what)

    def complete(self, entry: Entry, now: float) -> None:
        """Called when ``entry`` is over: its rank goes on if it waits for this entry."""
        if self.blocked.get(entry.rank) is entry:
            del self.blocked[entry.rank]
            self.agenda.plan(entry.rank, now)

    def in_front_of(self, entry: Entry) -> Entry | None:
        """The entry that blocks all that follows ``entry``, which was just posted, on its rank. It is the entry before
        it if everything goes through one hardware queue; else None.
        """
        held = self.one_queue and entry.left and entry.queue[0] is not entry
        return entry.queue[-2] if held else None

    def opened(self, rank: int, entry: Entry) -> None:
        """Called when ``rank`` has posted ``entry``."""
        if self.device_sync or self.any_wait:
            self._open[rank].append(entry)

    def unfinished(self, rank: int) -> list[Entry]:
        """The entries that a synchronisation of the device waits for, in the order posted."""
        self._open[rank] = [entry for entry in self._open[rank] if entry.left]
        return self._open[rank]

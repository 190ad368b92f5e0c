"""Ranks that run their programs against each other under the rules of the device: without time in ``rendezvous.py``,
with time in the simulator.

``rendezvous``   A send completes only when the matching receive is posted, and the other way round. Operations on one
                 queue run strictly in the order in which they were posted; a batch is one entry of its queue and leaves
                 it as a whole (``queues.py``). A wait holds back all that follows on its rank, while what was posted
                 goes on. A collective is over when every rank has posted it, in one order. NCCL is so with large
                 messages, gloo always.
``one_queue``    What is posted behind an unfinished operation of its own queue also holds back all that follows on its
                 rank, compute included: with CUDA_DEVICE_MAX_CONNECTIONS=1 everything goes through one hardware queue,
                 whose head waits for the stream that it belongs to. Sends within joined operations are posted once
                 one has made its result, so they may hold back the others.
``any_wait``     Any instruction may wait for an idle device, and so until everything that its rank has posted is over:
                 an operation whose kernel is launched for the first time or compiled, or whose allocation is tried
                 again, the allocation of a receive, the copy of what is sent, a collective's or a library's first call.
                 If a plan runs to its end where all of them wait, it does where some do (docs/proofs.md).
``device_sync``  Compute also holds back all that follows on its rank until everything that the rank has posted is over,
                 as ``torch.cuda.synchronize()`` within it does.
"""

from collections.abc import Collection, Iterator
from typing import Any

from megatron_pp.plan.ir.agenda import Agenda
from megatron_pp.plan.ir.spec import ANY_WAIT, DEVICE_SYNC, ONE_QUEUE, Plan
from megatron_pp.plan.verify.queues import Entry, QueueMachine


class DeviceRanks:
    """A subclass says how a rank runs its program (``program``), and when a transfer is over.

    ``rules``: those of the device that hold. ``blocked``: by rank, the entry that it waits for.
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
        self._open: list[list[Entry]] = [[] for _ in plan.programs]  # posted, and unfinished when last looked at
        self._running = [self.program(rank) for rank in range(len(plan.programs))]

    def program(self, rank: int) -> Iterator[Entry | float | None]:
        """Runs ``rank``'s program. Yields the entry that the rank waits for, the time until which it is busy, or None
        where it pauses.
        """
        raise NotImplementedError

    def resume(self, rank: int, now: float) -> None:
        """Run ``rank`` until it has to wait, or is at its end."""
        self.now = now
        what = next(self._running[rank], None)
        if isinstance(what, Entry):
            self.blocked[rank] = what
        elif what is not None:
            self.agenda.plan(rank, what)

    def complete(self, entry: Entry, now: float) -> None:
        """``entry`` is over: its rank goes on, where it waits for that."""
        if self.blocked.get(entry.rank) is entry:
            del self.blocked[entry.rank]
            self.agenda.plan(entry.rank, now)

    def in_front_of(self, entry: Entry) -> Entry | None:
        """What holds back all that follows ``entry``, which was just posted, on its rank: the entry before it, where
        everything goes through one hardware queue.
        """
        held = self.one_queue and entry.left and entry.queue[0] is not entry
        return entry.queue[-2] if held else None

    def opened(self, rank: int, entry: Entry) -> None:
        """``rank`` has posted ``entry``."""
        if self.device_sync or self.any_wait:
            self._open[rank].append(entry)

    def unfinished(self, rank: int) -> list[Entry]:
        """What a synchronisation of the device waits for, in the order posted."""
        self._open[rank] = [entry for entry in self._open[rank] if entry.left]
        return self._open[rank]

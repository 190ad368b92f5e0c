"""The queue machine decides which posted sends and receives meet, and when. ``rendezvous.py`` runs it without time, the
simulator's network with time.

A rank posts *entries* on its queues. An entry is one end of a message, or a batch of ends. Only the entry at the head
of a queue is active. Active ends meet in the order of their channel. When the transfer of two ends is over, both
entries lose an end. An entry is removed from its queue once all of its ends are done, and the next entry becomes
active.

The ends of a collective, one of each rank, meet when the collective is at the head of every rank's queue: all ranks
post their collectives on one communicator, and so in one order. The same holds for a rank and its data-parallel
replicas. Replicas run one plan in step, so one of them represents all (docs/proofs.md).

Each one-way channel has a queue. With shared channels there is one queue for everything between two ranks. Batches go
over the pipeline group's communicator, whatever they contain.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import channel_of, message_of
from megatron_pp.plan.ir.instruction import NONE, Instruction, later
from megatron_pp.plan.ir.spec import ONE_WAY, Plan

DATA = "data"
SHAPE = "shape"  # if shapes vary, a message's shape is sent ahead of it on the same channel
_GROUP = "group"
_COLLECTIVES = (NONE, NONE, "collectives")
_REPLICAS = "replicas"

Direction = tuple[int, int, str]  # source rank, target rank, and the channel that orders messages between them


@dataclass(slots=True, eq=False)
class Entry:
    """A posted end of a message, or a batch of ends. ``left`` counts its unfinished ends. ``posted`` and ``last`` are
    for the caller: when the entry was posted, and which transfer finished it.
    """

    rank: int
    at: Instruction
    queue: deque[Entry]
    posted: float
    ends: list[End] = field(default_factory=list)
    left: int = 0
    last: Any = None

    def state(self, since: int) -> Any:
        """The entry and its unfinished ends as a comparable value; microbatches are counted from ``since``."""
        return self.rank, later(self.at, -since), [(end.content, end.done) for end in self.ends]


class End:
    """One end of one message; ``content`` is DATA or SHAPE."""

    __slots__ = ("at", "content", "direction", "done", "entry", "is_send", "message")

    def __init__(self, at: Instruction, direction: Direction, content: str, entry: Entry) -> None:
        self.at = at
        self.direction = direction
        self.content = content
        self.message = message_of(at)
        self.entry = entry
        self.is_send = at.op in ins.SEND_OPS
        self.done = False

    @property
    def is_collective(self) -> bool:
        return self.at.op in ins.COLLECTIVE_POSTS

    @property
    def peer(self) -> int:
        return self.direction[1] if self.is_send else self.direction[0]


class Meeting(NamedTuple):
    """The two ends of one message, both posted and at the head of their queues."""

    send: End
    receive: End


Gathering = tuple[End, ...]
"""Every rank's end of one collective, all posted and at the head of their queues."""


class QueueMachine:
    """All queues and channels of a pipeline. ``met`` collects meetings until the caller takes them.

    ``ordered``: whether the head of a queue blocks the entries behind it, as in NCCL's streams and not in gloo's
    connections; collectives always do. ``replicas``: of the pipeline; their ranks follow each other in the plan.
    """

    def __init__(self, plan: Plan, ordered: bool = True, replicas: int = 1) -> None:
        self.one_way = plan.spec.channels == ONE_WAY
        self.ordered = ordered
        self.met: list[Meeting | Gathering] = []
        # (channel, rank) -> the ends of the collective that some ranks have reached.
        self.gathered: dict[Direction, dict[int, End]] = {}
        self._size = len(plan.programs)
        self._pipeline = self._size // replicas
        self.queues: dict[tuple[Any, ...], deque[Entry]] = {}
        self._sites: dict[tuple[int, str, int, bool], tuple[Direction, deque[Entry]]] = {}
        self._open_sends: dict[Direction, deque[End]] = {}
        self._open_receives: dict[Direction, deque[End]] = {}

    def post(self, rank: int, at: Instruction, content: str = DATA, now: float = 0.0) -> Entry:
        """Post a send, a receive or a BATCH. Raises PlanError if it has no other end."""
        grouped = bool(at.members)
        posts = at.members or (at,)
        directions = []
        for one in posts:
            direction, queue = self._sites.get((rank, one.op, one.peer, grouped)) or self._site(rank, one, grouped)
            directions.append(direction)
        in_order = self.ordered or at.op in ins.COLLECTIVE_POSTS
        entry = Entry(rank, at, queue if in_order else deque(), now)
        entry.ends = [End(one, way, content, entry) for one, way in zip(posts, directions, strict=True)]
        entry.left = len(directions)
        entry.queue.append(entry)
        if len(entry.queue) == 1:
            self.activate(entry, now)
        return entry

    def finish(self, end: End, now: float = 0.0) -> bool:
        """Called when the transfer of ``end`` is over. Returns whether this completes its entry."""
        end.done = True
        entry = end.entry
        entry.left -= 1
        if entry.left:
            return False
        entry.queue.popleft()
        entry.ends = []  # breaks a cycle: the ends hold the entry
        if entry.queue:
            self.activate(entry.queue[0], now)
        return True

    def state(self, since: int) -> Any:
        """All entries in queues and all ends that wait for a partner, in order; microbatches counted from ``since``."""
        queues = {key: [entry.state(since) for entry in queue] for key, queue in self.queues.items() if queue}
        waiting = [
            {way: [(later(end.at, -since), end.content) for end in ends] for way, ends in by_direction.items() if ends}
            for by_direction in (self._open_sends, self._open_receives)
        ]
        gathered = {way: {r: later(end.at, -since) for r, end in ends.items()} for way, ends in self.gathered.items()}
        return queues, waiting, gathered

    def activate(self, entry: Entry, now: float) -> None:
        """Called when the entry is at the head of its queue: its ends meet their partners, or wait for them."""
        for end in entry.ends:
            self.meet(end)

    def meet(self, end: End) -> None:
        """Called when ``end`` is active: it meets the first partner on its channel, or waits for one. Raises PlanError
        if the partner belongs to another message.
        """
        if end.is_collective:
            self._gather(end)
            return
        mine, theirs = self._open_sends, self._open_receives
        if not end.is_send:
            mine, theirs = theirs, mine
        partners = theirs.get(end.direction)
        if not partners:
            mine.setdefault(end.direction, deque()).append(end)
            return
        partner = partners.popleft()
        send, receive = (end, partner) if end.is_send else (partner, end)
        if (send.message, send.content) != (receive.message, receive.content):
            source, target, _ = send.direction
            raise PlanError(
                f"rank {target}: {receive.at} ({receive.at.name}) would receive what rank {source} sends with "
                f"{send.at} ({send.at.name}): messages between them cross"
            )
        self.met.append(Meeting(send, receive))

    def _gather(self, end: End) -> None:
        """Called when a rank reaches a collective. With the last rank the collective is met."""
        gathered = self.gathered.setdefault(end.direction, {})
        first = next(iter(gathered.values()), end)
        if first.message != end.message:
            raise PlanError(
                f"rank {end.entry.rank}: {end.at} ({end.at.name}) would be one collective with {first.at} of rank "
                f"{first.entry.rank}: all ranks post their collectives in one order"
            )
        gathered[end.entry.rank] = end
        if len(gathered) == len(self._members(end)):
            self.met.append(tuple(gathered.values()))
            del self.gathered[end.direction]

    def _members(self, end: End) -> range:
        """The ranks of a collective."""
        source, _, _ = end.direction
        return range(self._size) if source == NONE else range(source, self._size, self._pipeline)

    def missing_peer(self, end: End) -> int:
        """The rank that ``end`` waits for; of several ranks the first."""
        if not end.is_collective:
            return end.peer
        return next(rank for rank in self._members(end) if rank not in self.gathered[end.direction])

    def _site(self, rank: int, at: Instruction, grouped: bool) -> tuple[Direction, deque[Entry]]:
        """The direction of the message of ``at``, and the queue of ``rank`` on which it is posted."""
        if at.op in ins.COLLECTIVE_POSTS:
            member = rank % self._pipeline
            way = (member, member, _REPLICAS) if at.op in ins.STAGE_OPS else _COLLECTIVES
            return way, self.queues.setdefault((rank, *way), deque())
        if at.peer == NONE:
            raise PlanError(f"rank {rank}: {at} ({at.name}): stage {at.stage} has no neighbour on that side")
        source, target, kind = channel_of(at, rank)
        direction = (source, target, _GROUP if grouped else kind if self.one_way else "")
        key: tuple[Any, ...] = (rank, *direction) if self.one_way else (rank, *sorted((source, target)))
        queue = self.queues.setdefault((rank, _GROUP) if grouped else key, deque())
        site = self._sites[(rank, at.op, at.peer, grouped)] = (direction, queue)
        return site

"""Messages on the clock: where sends meet receives, and when transfers start. The rules are ``rendezvous.py``'s.

A rank posts *entries* (one end of a message, or a batch of ends) on its queues; only the entry at the head of a queue
is active. Active ends meet in the order of their channel; a pair that met takes its turn on the directed link. When
the transfer is over, both entries lose an end; an entry without ends left leaves its queue, and the next is active.

On gloo (``Network.gloo``) there are no queues, but a receive becomes active only once its sender can have heard of it:
when what was on the wire towards the sender, when the receive was posted, has left. Large messages have connections
of their own, and their receives are heard of at once.
"""

from __future__ import annotations

from collections import deque

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.costs import GLOO_DETACHED_BYTES, Network
from megatron_pp.plan.instruction import Instruction
from megatron_pp.plan.simulation import Transfer
from megatron_pp.plan.spec import ONE_WAY, Plan, PlanError

_GROUP = "group"  # what orders batches: one communicator for the whole pipeline group


class Entry:
    """Something posted. ``left`` counts its unfinished ends; ``last`` is the transfer that finished it."""

    __slots__ = ("last", "left", "posted", "queue", "rank")

    def __init__(self, rank: int, left: int, queue: deque[tuple[Entry, list[_End]]], posted: float) -> None:
        self.rank = rank
        self.left = left
        self.queue = queue
        self.posted = posted
        self.last: Transfer | None = None


class _End:
    """One end of one message; ``message`` is (kind, receiving stage, microbatch), ``heard`` when the other side can
    know of it."""

    __slots__ = ("channel", "entry", "heard", "is_send", "message")

    def __init__(
        self, channel: _Channel, is_send: bool, message: tuple[str, int, int], entry: Entry, heard: float
    ) -> None:
        self.channel = channel
        self.is_send = is_send
        self.message = message
        self.entry = entry
        self.heard = heard


class _Channel:
    """Messages from one rank to another that match in order: at any time only sends or only receives are open.
    ``unheard`` counts the receives whose announcement is on its way."""

    __slots__ = ("link", "open_receives", "open_sends", "unheard")

    def __init__(self, source: int, target: int) -> None:
        self.link = (source, target)
        self.unheard = 0
        self.open_sends: deque[_End] = deque()
        self.open_receives: deque[_End] = deque()


Announcement = _End  # of a receive


class Fabric:
    """All queues, channels and links of a pipeline.

    ``started`` collects (transfer, its sender's entry, its receiver's entry), ``announced`` (when, what to give to
    ``hear`` then), until the caller takes them.
    """

    def __init__(self, plan: Plan, network: Network) -> None:
        self.plan = plan
        self.network = network
        self.one_way = plan.spec.channels == ONE_WAY
        detached = self.one_way and not plan.spec.variable_shapes and network.activation_bytes >= GLOO_DETACHED_BYTES
        self.heard_late = network.gloo and not detached
        self.started: list[tuple[Transfer, Entry, Entry]] = []
        self.announced: list[tuple[float, Announcement]] = []
        self._queues: dict[tuple, deque[tuple[Entry, list[_End]]]] = {}
        self._channels: dict[tuple[int, int, str], _Channel] = {}
        self._wire_free: dict[tuple[int, int], float] = {}

    def post(self, rank: int, at: Instruction, now: float) -> Entry:
        """Post a send, a receive or a BATCH; ``started`` gets the transfers that can start because of it.

        Raises PlanError where a message has no other end, or would meet one that it is not meant for.
        """
        posts = at.members or (at,)
        orderings = [self._ordering(rank, one, bool(at.members)) for one in posts]
        queue = deque() if self.network.gloo else self._queues.setdefault((rank, *orderings[0][1]), deque())
        entry = Entry(rank, len(posts), queue, now)
        ends = [
            _End(channel, one.op in ins.SEND_OPS, message, entry, self._heard(channel, one.op, now))
            for one, (channel, _, message) in zip(posts, orderings, strict=True)
        ]
        queue.append((entry, ends))
        if len(queue) == 1:
            self._activate(ends, now)
        return entry

    def finish(self, transfer: Transfer, entries: tuple[Entry, Entry], now: float) -> list[Entry]:
        """The transfer is over. Returns the entries that it completed; what stood behind them may have started."""
        complete = []
        for entry in entries:
            entry.left -= 1
            if entry.left == 0:
                entry.last = transfer
                complete.append(entry)
                entry.queue.popleft()
                if entry.queue:
                    self._activate(entry.queue[0][1], now)
        return complete

    def hear(self, end: Announcement, now: float) -> None:
        """The sender has heard of this receive; the transfer may have started."""
        end.channel.unheard -= 1
        self._meet(end, now)

    def _heard(self, channel: _Channel, op: str, now: float) -> float:
        if op in ins.SEND_OPS or not self.heard_late:
            return now
        source, target = channel.link
        return max(now, self._wire_free.get((target, source), now))

    def _ordering(self, rank: int, at: Instruction, grouped: bool) -> tuple[_Channel, tuple, tuple[str, int, int]]:
        """(channel, key of the rank's queue, message) of one end."""
        stage, homes = self.plan.placement.stages[rank][at.chunk], self.plan.placement.homes
        kind = at.op[1]
        step = 1 if kind == "A" else -1
        target = stage + step if at.op in ins.SEND_OPS else stage
        if not (0 <= target < len(homes) and 0 <= target - step < len(homes)):
            raise PlanError(f"rank {rank}: {at} ({at.name}): stage {stage} has no neighbour on that side")
        source_rank, target_rank = homes[target - step][0], homes[target][0]
        key = (source_rank, target_rank, _GROUP if grouped else kind if self.one_way else "")
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel(source_rank, target_rank)
        if grouped:
            queue: tuple = (_GROUP,)
        else:
            queue = key if self.one_way else (min(key[:2]), max(key[:2]))
        return channel, queue, (kind, target, at.mb)

    def _activate(self, ends: list[_End], now: float) -> None:
        """The ends have come to the head of their queue: they meet their partners, or wait for them."""
        for end in ends:
            if not end.is_send and (end.heard > now or end.channel.unheard):  # announcements stay in order
                end.channel.unheard += 1
                self.announced.append((max(end.heard, now), end))
            else:
                self._meet(end, now)

    def _meet(self, end: _End, now: float) -> None:
        channel = end.channel
        mine, theirs = channel.open_sends, channel.open_receives
        if not end.is_send:
            mine, theirs = theirs, mine
        if not theirs:
            mine.append(end)
        elif end.is_send:
            self._start(end, theirs.popleft(), now)
        else:
            self._start(theirs.popleft(), end, now)

    def _start(self, send: _End, receive: _End, now: float) -> None:
        if send.message != receive.message:
            source, target = send.channel.link
            raise PlanError(
                f"rank {target} would receive {_words(send.message)} from rank {source} "
                f"where it expects {_words(receive.message)}: messages cross"
            )
        kind, stage, mb = send.message
        pair = send.channel.link
        link, size = self.network.between(*pair), self.network.message_bytes(kind)
        start = max(now, self._wire_free.get(pair, 0.0))
        off_the_wire = self._wire_free[pair] = start + link.wire_time(size)
        over = off_the_wire + link.latency
        posted = (send.entry.posted, receive.entry.posted)
        transfer = Transfer(*pair, kind, stage, mb, size, *posted, now, start, over)
        self.started.append((transfer, send.entry, receive.entry))


def _words(message: tuple[str, int, int]) -> str:
    kind, stage, mb = message
    what = "the activation" if kind == "A" else "the gradient"
    return f"{what} for stage {stage}, microbatch {mb}"

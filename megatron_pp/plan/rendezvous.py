"""The half of ``verify`` that runs all ranks against each other, under rendezvous semantics.

A send completes only when the matching receive is posted, and the other way round. Operations on one queue run
strictly in the order in which they were posted; a batch is one entry of its queue and leaves it as a whole. A wait
holds back all that follows on its rank, while what was posted goes on. That is what NCCL does with large messages and
a single hardware queue, and what gloo does always. The outcome does not depend on the order in which ranks are
advanced (each step only ever enables more), so one run decides.
"""

from __future__ import annotations

from collections import deque

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.instruction import Instruction
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.spec import ONE_WAY, Plan, PlanError

_GROUP = ("group",)  # the queue of batches: one communicator for the whole pipeline group
_DATA = "data"
_SHAPE = "shape"  # where shapes vary, a message's shape goes ahead of it on the same channel
Message = tuple[str, int, int, str]  # (activation "A" or gradient "G", receiving stage, microbatch, _DATA or _SHAPE)
Direction = tuple[int, int, str]  # (source rank, destination rank, what orders them)


class _Entry:
    """Something posted: one send or receive, or a batch of them."""

    __slots__ = ("at", "left", "ops", "queue", "rank")

    def __init__(self, rank: int, at: Instruction, queue: tuple, ops: list[_End]) -> None:
        self.rank = rank
        self.at = at
        self.queue = queue
        self.ops = ops
        self.left = len(ops)


class _End:
    """One end of a message."""

    __slots__ = ("at", "direction", "done", "entry", "is_send", "message", "peer")

    def __init__(self, at: Instruction, message: Message, direction: Direction, is_send: bool) -> None:
        self.at = at
        self.message = message
        self.direction = direction
        self.is_send = is_send
        self.peer = direction[1] if is_send else direction[0]
        self.done = False
        self.entry: _Entry | None = None


def check_rendezvous(plan: Plan) -> None:
    """Raises PlanError where the plan can hang or a receive would get another message than it is meant for, with the
    cycle in words.
    """
    _Run(plan).run()


class _Run:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.placement: Placement = plan.placement
        self.one_way = plan.spec.channels == ONE_WAY
        self.shapes_first = plan.spec.variable_shapes
        self.at = [0] * len(plan.programs)
        self.queues: dict[tuple, deque[_Entry]] = {}
        self.open_sends: dict[Direction, deque[_End]] = {}
        self.open_receives: dict[Direction, deque[_End]] = {}
        self.posted: list[dict[tuple[Instruction, str], _End]] = [{} for _ in plan.programs]
        self.blocked: dict[int, _End] = {}  # rank -> the end that its current instruction waits for
        self.ready: list[int] = list(range(len(plan.programs)))

    def run(self) -> None:
        while self.ready:
            self._advance(self.ready.pop())
        stuck = [r for r in range(len(self.at)) if self.at[r] < len(self.plan.programs[r])]
        if stuck:
            raise PlanError(self._describe_cycle(stuck[0]))
        unfinished = [q[0] for q in self.queues.values() if q]
        if unfinished:
            entry = unfinished[0]
            end = next(e for e in entry.ops if not e.done)
            raise PlanError(
                f"rank {entry.rank}: {end.at} ({end.at.name}) has no partner: rank {end.peer} never posts the other end"
            )

    def _advance(self, rank: int) -> None:
        program = self.plan.programs[rank]
        i = self.at[rank]
        while i < len(program):
            unfinished = self._execute(rank, program[i])
            if unfinished is not None:
                self.blocked[rank] = unfinished
                break
            i += 1
        self.at[rank] = i

    def _execute(self, rank: int, at: Instruction) -> _End | None:
        """Post what ``at`` posts. Returns the end that ``at`` has to wait for before it is done and the next one can
        start.
        """
        op = at.op
        if op in ins.WAIT_OPS or op in ins.RELEASE_OPS:
            return self._await(rank, at)
        if op == ins.BATCH:
            return self._post_batch(rank, at)
        if op in ins.SEND_OPS or op in ins.RECV_OPS:
            if self.shapes_first:
                self._post_one(rank, at, _SHAPE)
            if not self.shapes_first or op in ins.SEND_OPS:
                self._post_one(rank, at, _DATA)
        return None

    def _await(self, rank: int, at: Instruction) -> _End | None:
        """Where shapes come first, a WAIT waits for the shape, posts the receive of the tensor, and waits for that."""
        mine, post = self.posted[rank], ins.instruction(_POSTED_BY[at.op], at.chunk, at.mb)
        data = mine.get((post, _DATA))
        if data is None:
            shape = mine.get((post, _SHAPE))
            if shape is None:
                raise PlanError(f"rank {rank}: {at} ({at.name}) waits for what was never posted")
            if not self._is_done(shape):
                return shape
            data = self._post_one(rank, post, _DATA)
        return None if self._is_done(data) else data

    def _post_batch(self, rank: int, at: Instruction) -> _End | None:
        """Where shapes come first, they are a batch of their own, and waited for."""
        if self.shapes_first:
            shape = self.posted[rank].get((at.members[0], _SHAPE))
            if shape is None or shape.entry is None or shape.entry.at is not at:
                ends = [self._end(rank, member, _SHAPE) for member in at.members]
                self._post(rank, at, ends, _GROUP)
                shape = ends[0]
            if not self._is_done(shape):
                return shape
        self._post(rank, at, [self._end(rank, member, _DATA) for member in at.members], _GROUP)
        return None

    def _post_one(self, rank: int, at: Instruction, part: str) -> _End:
        end = self._end(rank, at, part)
        self._post(rank, at, [end], self._queue_of(end))
        return end

    def _end(self, rank: int, at: Instruction, part: str) -> _End:
        stage = self.placement.stages[rank][at.chunk]
        is_send = at.op in ins.SEND_OPS
        kind = at.op[1]
        step = 1 if kind == "A" else -1
        target = stage + step if is_send else stage
        homes = self.placement.homes
        if not 0 <= target - step < len(homes) or not 0 <= target < len(homes):
            raise PlanError(f"rank {rank}: {at} ({at.name}): stage {stage} has no neighbour on that side")
        source_rank, target_rank = homes[target - step][0], homes[target][0]
        direction = (source_rank, target_rank, kind if self.one_way else "")
        end = _End(at, (kind, target, at.mb, part), direction, is_send)
        self.posted[rank][(at, part)] = end
        return end

    def _queue_of(self, end: _End) -> tuple:
        source, target, _ = end.direction
        return end.direction if self.one_way else (min(source, target), max(source, target))

    def _post(self, rank: int, at: Instruction, ends: list[_End], queue: tuple) -> None:
        entry = _Entry(rank, at, queue, ends)
        if queue is _GROUP:  # whatever is in it, a batch goes over the group's one communicator
            for end in ends:
                end.direction = (*end.direction[:2], "group")
        for end in ends:
            end.entry = entry
        waiting = self.queues.setdefault((rank, *queue), deque())
        waiting.append(entry)
        if len(waiting) == 1:
            self._activate(entry)

    def _activate(self, entry: _Entry) -> None:
        """The entry has come to the head of its queue: its ends can meet their partners."""
        for end in entry.ops:
            mine, theirs = (
                (self.open_sends, self.open_receives) if end.is_send else (self.open_receives, self.open_sends)
            )
            partners = theirs.get(end.direction)
            if partners:
                self._meet(end, partners.popleft())
            else:
                mine.setdefault(end.direction, deque()).append(end)

    def _meet(self, one: _End, other: _End) -> None:
        send, receive = (one, other) if one.is_send else (other, one)
        if send.message != receive.message:
            source, target, _ = send.direction
            raise PlanError(
                f"rank {target}: {receive.at} ({receive.at.name}) would receive what rank {source} sends with "
                f"{send.at} "
                f"({send.at.name}): messages between them cross"
            )
        for end in (one, other):
            end.done = True
            entry = end.entry
            assert entry is not None
            entry.left -= 1
            if entry.left == 0:
                self._complete(entry)

    def _complete(self, entry: _Entry) -> None:
        key = (entry.rank, *entry.queue)
        queue = self.queues[key]
        queue.popleft()
        waiting = self.blocked.get(entry.rank)
        if waiting is not None and waiting.entry is entry:
            del self.blocked[entry.rank]
            self.ready.append(entry.rank)
        if queue:
            self._activate(queue[0])

    def _is_done(self, end: _End) -> bool:
        return end.entry is not None and end.entry.left == 0

    def _describe_cycle(self, rank: int) -> str:
        """Follow who waits for whom from ``rank`` until a rank comes up again or is not waiting."""
        seen: list[int] = []
        lines: list[str] = []
        current = rank
        while current not in seen:
            seen.append(current)
            end = self.blocked.get(current)
            if end is None:
                lines.append(f"rank {current} is at its end")
                break
            head = self._head_in_front_of(current, end)
            current_at = self.plan.programs[current][self.at[current]]
            behind = "" if head.entry is end.entry else f" (its {end.at} is queued behind it)"
            other = "receive" if head.is_send else "send"
            lines.append(
                f"rank {current} waits at {current_at} for rank {head.peer} to post the {other} that matches "
                f"{head.at}{behind}"
            )
            current = head.peer
        start = seen.index(current) if current in seen else 0
        return f"deadlock under rendezvous: {'; '.join(lines[start:])}"

    def _head_in_front_of(self, rank: int, end: _End) -> _End:
        """The end without a partner at the head of the queue that ``end`` stands in."""
        assert end.entry is not None
        key = (rank, *end.entry.queue)
        head = self.queues[key][0]
        return next(e for e in head.ops if not e.done)


_POSTED_BY = {
    ins.WAIT_ACT: ins.RECV_ACT,
    ins.WAIT_GRAD: ins.RECV_GRAD,
    ins.RELEASE_ACT: ins.SEND_ACT,
    ins.RELEASE_GRAD: ins.SEND_GRAD,
}

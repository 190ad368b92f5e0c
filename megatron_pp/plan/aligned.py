"""The common case of ``rendezvous.py``, decided in a fifth of its time: queues that are aligned.

A queue is *aligned* where its other end, the queue of the peer, holds the other ends of the same messages in the same
order, each posted by itself. Then the k-th operations of both are over as soon as both are posted: whoever posts the
k-th has posted those before it, and nothing else can be met. So what a rank waits for is that its peer has come to one
place of its program, and a run compares positions alone.

Plans with batches, collectives or variable shapes, and all that does not run to its end here, are left to the queue
machine, which names what is wrong. That each message has one sender and is posted once, one rank's rules say
(``lifetime.py``).
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_pp.plan.dataflow import channel_of, message_of
from megatron_pp.plan.instruction import COMPUTE_OPS, POST_OF, SINGLE_COMPUTE_OPS, TRANSFER_OPS, Instruction, later
from megatron_pp.plan.repeated import Block
from megatron_pp.plan.spec import DEVICE_SYNC, ONE_QUEUE, ONE_WAY, Plan

_Message = tuple[str, int, int, int, str]  # the fields of a Message
_Key = tuple[int, int, str]  # the two ranks, and FORWARD or BACKWARD where that is a queue by itself


def runs_aligned(plan: Plan, device: Collection[str], block: Block | None = None) -> bool:
    """Whether all queues are aligned and every rank comes to its end, under rendezvous and ``device``; with ``block``,
    whether besides ranks that run to its ends come to a standstill as ranks that run to its starts do.
    """
    if plan.spec.variable_shapes or plan.placement.barriers:
        return False
    ranks = []
    for rank in range(len(plan.programs)):
        ranks.append(_Rank(plan, rank, device))
        if not ranks[rank].is_simple:
            return False
    if not all(_is_aligned(rank, ranks) for rank in ranks):
        return False
    run = _Run(ranks)
    if block is not None:
        run.upto(block.starts)
        before = run.state(block.starts, 0)
        run.upto(block.ends)
        if run.state(block.ends, block.microbatches) != before:
            return False
    run.upto([len(program) for program in plan.programs])
    return all(done == len(needs) for done, needs in zip(run.next, run.needs, strict=True))


class _Queue:
    """What a rank posts on one queue: by number, the message, and where in the program it is posted and waited for.
    ``needed``: the last number that the rank is known to have waited for.
    """

    def __init__(self, key: _Key, peer: int) -> None:
        self.key = key
        self.peer = peer
        self.messages: list[_Message] = []
        self.positions: list[int] = []
        self.finishes: dict[int, int] = {}
        self.needed = -1


class _Site(NamedTuple):
    """The sends, or the receives, of one kind to or from one peer: ``posted`` are those not waited for, by message."""

    queue: _Queue
    kind: str
    to_receiver: int  # stages from the one that posts to the one that receives
    posted: dict[_Message, int]


class _Rank:
    """The queues of one rank. ``needs``: at which position it waits until which number of which queue is over.
    ``is_simple``: every operation is posted by itself, and before it is waited for.
    """

    def __init__(self, plan: Plan, rank: int, device: Collection[str]) -> None:
        self.rank = rank
        self.program = plan.programs[rank]
        self.one_way = plan.spec.channels == ONE_WAY
        self.one_queue, self.device_sync = ONE_QUEUE in device, DEVICE_SYNC in device
        self.queues: dict[_Key, _Queue] = {}
        self.needs: list[tuple[int, _Queue, int]] = []
        self._sites: dict[tuple[str, int], _Site] = {}  # by the op that posts, and the peer
        self.is_simple = self._follow()

    def _follow(self) -> bool:
        sites, one_queue = self._sites, self.one_queue
        for position, at in enumerate(self.program):
            op, stage, mb, peer, _, part, tensor, members = at
            if op in TRANSFER_OPS:
                post = POST_OF.get(op, op)
                queue, kind, to_receiver, posted = sites.get((post, peer)) or self._site(post, at)
                message = (kind, stage + to_receiver, mb, part, tensor)
                if op != post:
                    number = posted.pop(message, None)
                    if number is None:
                        return False
                    queue.finishes[number] = position
                else:
                    number = posted[message] = len(queue.positions)
                    queue.messages.append(message)
                    queue.positions.append(position)
                    number = number - 1 if one_queue else -1  # what is in front of it on its queue
                if number > queue.needed:
                    self._need(position, queue, number)
            elif members and not SINGLE_COMPUTE_OPS.issuperset(one.op for one in members):
                return False
            elif self.device_sync and op in COMPUTE_OPS:
                for queue in self.queues.values():
                    self._need(position, queue, len(queue.positions) - 1)
        return True

    def _need(self, position: int, queue: _Queue, number: int) -> None:
        if number > queue.needed:
            queue.needed = number
            self.needs.append((position, queue, number))

    def _site(self, post: str, at: Instruction) -> _Site:
        source, target, kind = channel_of(at, self.rank)
        key = (source, target, kind) if self.one_way else (min(source, target), max(source, target), "")
        queue = self.queues.setdefault(key, _Queue(key, at.peer))
        to_receiver = message_of(at).stage - at.stage
        site = self._sites[(post, at.peer)] = _Site(queue, kind, to_receiver, {})
        return site


def _is_aligned(rank: _Rank, ranks: Sequence[_Rank]) -> bool:
    for key, queue in rank.queues.items():
        other = ranks[queue.peer].queues.get(key) if 0 <= queue.peer < len(ranks) else None
        if other is None or other.peer != rank.rank or queue.messages != other.messages:
            return False
    return True


class _Run:
    """All ranks against each other. ``reached[r]``: rank r has posted all that stands before it."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self.ranks = ranks
        self.reached = [0] * len(ranks)
        self.next = [0] * len(ranks)  # of its needs
        # Of each need of each rank: where the rank waits, for which peer, and what that has to reach.
        self.needs = [
            [(at, queue.peer, ranks[queue.peer].queues[queue.key].positions[k]) for at, queue, k in rank.needs]
            for rank in ranks
        ]

    def upto(self, limits: Sequence[int]) -> None:
        """Run every rank to its limit, or until nothing moves."""
        ready = list(range(len(limits)))
        waiting: list[list[int]] = [[] for _ in limits]  # by the rank that is waited for
        while ready:
            rank = ready.pop()
            before = self.reached[rank]
            peer = self._advance(rank, limits[rank])
            if peer is not None:
                waiting[peer].append(rank)
            if self.reached[rank] > before:
                ready += waiting[rank]
                waiting[rank] = []

    def _advance(self, rank: int, limit: int) -> int | None:
        """Run ``rank`` up to ``limit``; returns the rank that it has to wait for."""
        needs, reached, k = self.needs[rank], self.reached, self.next[rank]
        while k < len(needs) and needs[k][0] < limit and reached[needs[k][1]] > needs[k][2]:
            k += 1
        self.next[rank] = k
        if k < len(needs) and needs[k][0] < limit:
            at, peer, _ = needs[k]
            reached[rank] = at + 1  # what it posts there is posted, and waits for its turn
            return peer
        reached[rank] = limit
        return None

    def state(self, limits: Sequence[int], since: int) -> Any:
        """All that the rest of the run depends on, microbatches counted from ``since``: what each rank has still to run
        up to its limit, and of its queues what has no partner yet, and what was posted and not waited for.
        """
        return [list(self._state_of(rank, limits[rank.rank], since)) for rank in self.ranks]

    def _state_of(self, rank: _Rank, limit: int, since: int) -> Iterator[Any]:
        reached, k = self.reached, self.next[rank.rank]
        at = min([limit, *(need[0] for need in self.needs[rank.rank][k : k + 1])])
        yield [later(one, -since) for one in rank.program[at:limit]]
        for key, queue in sorted(rank.queues.items()):
            other = self.ranks[queue.peer].queues[key]
            count = bisect_left(queue.positions, reached[rank.rank])
            over = min(count, bisect_left(other.positions, reached[queue.peer]))
            kept = [k for k in range(count) if k >= over or queue.finishes.get(k, at) >= at]
            yield key, [(_earlier(queue.messages[k], since), k < over) for k in kept]


def _earlier(message: _Message, microbatches: int) -> _Message:
    kind, stage, mb, part, tensor = message
    return kind, stage, mb - microbatches, part, tensor

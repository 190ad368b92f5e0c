"""The common case of ``rendezvous.py``, decided in a fifth of its time: queues that are aligned.

A queue is *aligned* where its other end, the queue of the peer, holds the other ends of the same messages in the same
order, each posted by itself. Then the k-th operations of both are over as soon as both are posted: whoever posts the
k-th has posted those before it, and nothing else can be met. So what a rank waits for is that its peer has come to one
place of its program, and a run compares positions alone.

Plans with batches, collectives or variable shapes, and all that does not run to its end here, are left to the queue
machine, which names what is wrong. That each message has one sender and is posted once, one rank's rules say
(``lifetime.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import Any, NamedTuple

from megatron_pp.plan.dataflow import channel_of, message_of
from megatron_pp.plan.instruction import (
    COMPUTE_OPS,
    FINISHED_BY,
    GROUP_OPS,
    NONE,
    POST_OF,
    SINGLE_COMPUTE_OPS,
    TRANSFER_OPS,
    later,
)
from megatron_pp.plan.repeated import Block
from megatron_pp.plan.sites import Site, are_before, positions_of, sites_of
from megatron_pp.plan.spec import DEVICE_SYNC, ONE_QUEUE, ONE_WAY, Plan

_Name = tuple[str, int, int, str]  # the fields of a Message but for the microbatch
_Key = tuple[int, int, str]  # the two ranks, and FORWARD or BACKWARD where that is a queue by itself


def runs_aligned(
    plan: Plan, device: Collection[str], block: Block | None = None, ranks: Sequence[RankQueues] | None = None
) -> bool:
    """Whether all queues are aligned and every rank comes to its end, under rendezvous and ``device``; with ``block``,
    whether besides ranks that run to its ends come to a standstill as ranks that run to its starts do. ``ranks``: the
    queues of each, where they are known.
    """
    if ranks is None:
        ranks = [RankQueues(plan, rank, device, sites_of(program)) for rank, program in enumerate(plan.programs)]
    if not all(rank.is_simple for rank in ranks) or not all(_is_aligned(rank, ranks) for rank in ranks):
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


class _Queue(NamedTuple):
    """What a rank posts on one queue, in order: where in the program each is posted and waited for, and its message, of
    which ``names`` hold all but the microbatch.
    """

    peer: int
    positions: tuple[int, ...]
    finishes: tuple[int, ...]
    names: tuple[_Name, ...]
    microbatches: tuple[int, ...]


class RankQueues:
    """The queues of one rank. ``needs``: at which position it waits until which number of which queue is over.
    ``is_simple``: every operation is posted by itself, and before it is waited for.
    """

    def __init__(self, plan: Plan, rank: int, device: Collection[str], sites: Sequence[Site]) -> None:
        self.rank = rank
        self.program = plan.programs[rank]
        self.one_way = plan.spec.channels == ONE_WAY
        self.queues: dict[_Key, _Queue] = {}
        self.needs: list[tuple[int, _Key, int]] = []
        self.is_simple = not plan.spec.variable_shapes and not plan.placement.barriers and self._follow(sites)
        if self.is_simple:
            self._find_needs(positions_of(COMPUTE_OPS if DEVICE_SYNC in device else (), sites), ONE_QUEUE in device)

    def _follow(self, sites: Iterable[Site]) -> bool:
        """Fill the queues; whether they are simple."""
        never = len(self.program)
        ends = {site.at._replace(mb=NONE): site for site in sites if site.at.op in TRANSFER_OPS}
        entries: defaultdict[tuple[_Key, int], list[tuple[int, int, _Name, int]]] = defaultdict(list)
        for at, (_, positions, microbatches) in ends.items():
            post = POST_OF.get(at.op)
            if post is not None and at._replace(op=post) not in ends:
                return False
            if post is not None:
                continue
            finish = ends.get(at._replace(op=FINISHED_BY[at.op]))
            over = dict(zip(finish.microbatches, finish.positions, strict=True)) if finish else {}
            finishes = [over.get(mb, never) for mb in microbatches]
            once = len(over) == len(finish.positions if finish else ()) and len(set(microbatches)) == len(microbatches)
            if not once or not over.keys() <= set(microbatches) or not are_before(positions, finishes):
                return False
            source, target, kind = channel_of(at, self.rank)
            key = (source, target, kind) if self.one_way else (min(source, target), max(source, target), "")
            name = kind, message_of(at).stage, at.slice, at.tensor
            entries[(key, at.peer)] += zip(positions, finishes, repeat(name), microbatches)
        self.queues = {key: _Queue(peer, *zip(*sorted(posts), strict=True)) for (key, peer), posts in entries.items()}
        groups = (self.program[k] for k in positions_of(GROUP_OPS, sites))
        return all(one.op in SINGLE_COMPUTE_OPS for at in groups for one in at.members)

    def _find_needs(self, computes: Sequence[int], one_queue: bool) -> None:
        never = len(self.program)
        for key, queue in self.queues.items():
            waits = [(at, number) for number, at in enumerate(queue.finishes) if at < never]
            if one_queue:
                waits += zip(queue.positions[1:], count())  # for what is in front of it on its queue
            waits += ((at, bisect_left(queue.positions, at) - 1) for at in computes)
            needed = -1
            for at, number in sorted(waits):
                if number > needed:
                    needed = number
                    self.needs.append((at, key, number))
        self.needs.sort()


def _is_aligned(rank: RankQueues, ranks: Sequence[RankQueues]) -> bool:
    for key, queue in rank.queues.items():
        other = ranks[queue.peer].queues.get(key) if 0 <= queue.peer < len(ranks) else None
        if other is None or other.peer != rank.rank:
            return False
        if (queue.names, queue.microbatches) != (other.names, other.microbatches):
            return False
    return True


class _Run:
    """All ranks against each other. ``reached[r]``: rank r has posted all that stands before it."""

    def __init__(self, ranks: Sequence[RankQueues]) -> None:
        self.ranks = ranks
        self.reached = [0] * len(ranks)
        self.next = [0] * len(ranks)  # of its needs
        # Of each need of each rank: where the rank waits, for which peer, and what that has to reach.
        self.needs: list[list[tuple[int, int, int]]] = []
        for rank in ranks:
            theirs = {key: (queue.peer, ranks[queue.peer].queues[key].positions) for key, queue in rank.queues.items()}
            self.needs.append([(at, theirs[key][0], theirs[key][1][k]) for at, key, k in rank.needs])

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

    def _state_of(self, rank: RankQueues, limit: int, since: int) -> Iterator[Any]:
        reached, k = self.reached, self.next[rank.rank]
        at = min([limit, *(need[0] for need in self.needs[rank.rank][k : k + 1])])
        yield [later(one, -since) for one in rank.program[at:limit]]
        for key, queue in sorted(rank.queues.items()):
            other = self.ranks[queue.peer].queues[key]
            count = bisect_left(queue.positions, reached[rank.rank])
            over = min(count, bisect_left(other.positions, reached[queue.peer]))
            kept = [k for k in range(count) if k >= over or queue.finishes[k] >= at]
            yield key, [(queue.names[k], queue.microbatches[k] - since, k < over) for k in kept]

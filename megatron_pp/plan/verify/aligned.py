"""The common case of ``rendezvous.py``, decided in a fifth of its time: queues that are aligned.

A queue is *aligned* where its other end, the queue of the peer, holds the other ends of the same messages in the same
order. Then the k-th operations of both are over as soon as both are posted: whoever posts the k-th has posted those
before it, and nothing else can be met. So what a rank waits for is that its peer has come to one place of its program,
and a run compares positions alone. A batch is over when all its members are.

Plans with collectives, and all that does not run to its end here, are left to the queue machine, which names what is
wrong. That each message has one sender and is posted once, one rank's rules say (``lifetime.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from megatron_pp.plan.ir.instruction import later
from megatron_pp.plan.ir.repeated import Block
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.verify.rank_queues import Batch, RankQueues
from megatron_pp.plan.verify.sites import RankSites


def runs_aligned(
    plan: Plan, device: Collection[str], block: Block | None = None, ranks: Sequence[RankQueues] | None = None
) -> bool:
    """Whether all queues are aligned and every rank comes to its end, under rendezvous and ``device``; with ``block``,
    whether besides ranks that run to its ends come to a standstill as ranks that run to its starts do. ``ranks``: the
    queues of each, where they are known.
    """
    if ranks is None:
        ranks = [RankQueues(plan, rank, device, RankSites(program)) for rank, program in enumerate(plan.programs)]
    if not all(rank.is_simple for rank in ranks) or not all(_is_aligned(rank, ranks) for rank in ranks):
        return False
    run = _Run(ranks)
    if block is not None:
        starts, ends = ([at.place(k) for at, k in zip(ranks, of, strict=True)] for of in (block.starts, block.ends))
        run.upto(starts)
        before = run.state(starts, 0)
        run.upto(ends)
        if run.state(ends, block.microbatches) != before:
            return False
    run.upto([rank.end for rank in ranks])
    return all(done == len(needs) for done, needs in zip(run.next, run.needs, strict=True))


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
        yield at % rank.step, [later(one, -since) for one in rank.sites.line[at // rank.step : limit // rank.step]]
        batches: set[Batch] = set()  # those that are waited for
        for key, queue in sorted(rank.queues.items()):
            other = self.ranks[queue.peer].queues[key]
            count = bisect_left(queue.positions, reached[rank.rank])
            over = min(count, bisect_left(other.positions, reached[queue.peer]))
            kept = [k for k in range(count) if k >= over or queue.finishes[k] >= at]
            yield key, [(queue.names[k], queue.microbatches[k] - since, k < over) for k in kept]
            if rank.batches:
                batches.update(rank.batches[queue.positions[k] // rank.step] for k in kept)
        yield [[later(one, -since) for one in rank.sites.line[start:stop]] for start, stop, _ in sorted(batches)]

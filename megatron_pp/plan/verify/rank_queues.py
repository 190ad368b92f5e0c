"""What one rank posts on each of its queues, in order: what ``aligned.py`` compares."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import count, repeat
from typing import NamedTuple

from megatron_pp.plan.ir.dataflow import channel_of, message_of
from megatron_pp.plan.ir.instruction import (
    BATCH,
    COMPUTE_OPS,
    FINISHED_BY,
    NONE,
    PAIR,
    POST_OF,
    POST_OPS,
    RECV_OPS,
    SEND_OPS,
    SINGLE_COMPUTE_OPS,
    TRANSFER_OPS,
    Instruction,
)
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_QUEUE, ONE_WAY, Plan
from megatron_pp.plan.verify.sites import RankSites, are_before, positions_of

Key = tuple[int, int, str]
"""The two ranks, and FORWARD or BACKWARD where that is a queue by itself; of batches, source and target, and BATCH."""

_Name = tuple[str, int, int, str, int]  # the fields of a Message but for the microbatch, and which part of it
_IN_PAIRS = SINGLE_COMPUTE_OPS | SEND_OPS


class Queue(NamedTuple):
    """What a rank posts on one queue, in order: where each is posted, where the rank needs it over, where its WAIT or
    FREE stands, and its message, of which ``names`` hold all but the microbatch.
    """

    peer: int
    positions: tuple[int, ...]
    needed: tuple[int, ...]
    finishes: tuple[int, ...]
    names: tuple[_Name, ...]
    microbatches: tuple[int, ...]


class _Posts(NamedTuple):
    """Those of one site: where they stand in the line, where what waits for each does, and their microbatches."""

    at: Instruction
    positions: list[int]
    finishes: list[int]
    microbatches: list[int]


class Batch(NamedTuple):
    """Where its members stand in the line, and what first waits for it."""

    start: int
    stop: int
    finish: int


class RankQueues:
    """The queues of one rank. ``needs``: at which place it waits until which number of which queue is over.
    ``is_simple``: every operation is posted by itself, or in a batch that is over before the next one, and before it is
    waited for.

    Places are positions in the rank's line, doubled where shapes travel ahead: a shape and its tensor are posted one
    after the other. A batch is on the queues of all its members: as it is alone on its rank's, each of them is at the
    head.
    """

    def __init__(self, plan: Plan, rank: int, device: Collection[str], sites: RankSites) -> None:
        self.rank = rank
        self.sites = sites
        self.one_way = plan.spec.channels == ONE_WAY
        self.shapes = plan.spec.variable_shapes
        self.step = 2 if self.shapes else 1
        self.queues: dict[Key, Queue] = {}
        self.needs: list[tuple[int, Key, int]] = []
        self.batches: dict[int, Batch] = {}  # by the position of each member
        self.is_simple = not plan.placement.barriers and self._groups_are_known(device) and self._follow()
        if self.is_simple:
            computes = positions_of(COMPUTE_OPS if DEVICE_SYNC in device else (), sites.sites)
            self._find_needs([self.step * at for at in computes], ONE_QUEUE in device and not sites.batches)

    @property
    def end(self) -> int:
        """The place behind the program."""
        return self.place(len(self.sites.program))

    def place(self, entry: int) -> int:
        """That of an entry of the program."""
        return self.step * self.sites.index[entry]

    def _groups_are_known(self, device: Collection[str]) -> bool:
        """Whether all posts are in batches, or none is, and none in a pair that may wait for it as a whole."""
        sites = self.sites
        if not sites.grouped:
            return True
        posts = sum(len(site.positions) for site in sites.sites if site.at.op in POST_OPS)
        pairs = (sites.program[k] for k in sites.entries({PAIR}))
        if not sites.batches_post or any(one.op not in _IN_PAIRS for at in pairs for one in at.members):
            return False
        if sites.batches:
            return sum(map(len, sites.batches)) == posts
        return DEVICE_SYNC not in device or len(sites.entries(POST_OPS)) == posts

    def _follow(self) -> bool:
        """Fill the queues; whether they are simple."""
        sites = self._posts()
        if sites is None or not self._follow_batches(sites):
            return False
        if self.shapes and any(len(self.sites.line) in of.finishes for of in sites if of.at.op in RECV_OPS):
            return False  # a tensor is not received before what waits for it
        entries: defaultdict[tuple[Key, int], list[tuple[int, int, int, _Name, int]]] = defaultdict(list)
        for of in sites:
            source, target, kind = channel_of(of.at, self.rank)
            key = (source, target, kind) if self.one_way else (min(source, target), max(source, target), "")
            posts = entries[((source, target, BATCH) if self.batches else key, of.at.peer)]
            finishes = [self.step * at for at in of.finishes] if self.shapes else of.finishes
            for part, (places, needed) in enumerate(self._parts(of)):
                name = kind, message_of(of.at).stage, of.at.slice, of.at.tensor, part
                posts += zip(places, needed, finishes, repeat(name), of.microbatches)
        self.queues = {key: Queue(peer, *zip(*sorted(posts), strict=True)) for (key, peer), posts in entries.items()}
        return True

    def _posts(self) -> list[_Posts] | None:
        """Of all sites; None where one is waited for twice, or before it is posted."""
        found, never = [], len(self.sites.line)
        ends = {site.at._replace(mb=NONE): site for site in self.sites.sites if site.at.op in TRANSFER_OPS}
        for at, (first, positions, microbatches) in ends.items():
            post = POST_OF.get(at.op)
            if post is not None and at._replace(op=post) not in ends:
                return None
            if post is not None:
                continue
            finish = ends.get(at._replace(op=FINISHED_BY[at.op]))
            over = dict(zip(finish.microbatches, finish.positions, strict=True)) if finish else {}
            finishes = [over.get(mb, never) for mb in microbatches]
            once = len(over) == len(finish.positions if finish else ()) and len(set(microbatches)) == len(microbatches)
            if not once or not over.keys() <= set(microbatches) or not are_before(positions, finishes):
                return None
            found.append(_Posts(first, positions, finishes, microbatches))
        return found

    def _follow_batches(self, sites: Iterable[_Posts]) -> bool:
        """Note the batches; whether each is over before the next one is posted."""
        if not self.sites.batches:
            return True
        finishes = {at: finish for of in sites for at, finish in zip(of.positions, of.finishes, strict=True)}
        over = -1
        for members in self.sites.batches:
            if over >= members.start:
                return False
            over = min(finishes[at] for at in members)
            self.batches.update(dict.fromkeys(members, Batch(members.start, members.stop, over)))
        return True

    def _parts(self, of: _Posts) -> Sequence[tuple[Iterable[int], Iterable[int]]]:
        """Of their shapes, where those travel ahead, and of their tensors: where each is posted, and needed."""
        batches = [self.batches[at] for at in of.positions] if self.batches else []
        finishes = [batch.finish for batch in batches] if batches else of.finishes
        if not self.shapes:
            return [(of.positions, finishes)]
        waits = [2 * at for at in finishes]
        if batches:  # the shapes of all members, which are waited for, then all tensors
            shapes = [batch.start + at for at, batch in zip(of.positions, batches, strict=True)]
            tensors = [batch.stop + at for at, batch in zip(of.positions, batches, strict=True)]
            return [(shapes, [batch.start + batch.stop - 1 for batch in batches]), (tensors, waits)]
        shapes = [2 * at for at in of.positions]
        if of.at.op in RECV_OPS:  # a tensor's receive is posted where it is waited for
            tensors = [at + 1 for at in waits]
            return [(shapes, waits), (tensors, tensors)]
        return [(shapes, repeat(self.end)), ([at + 1 for at in shapes], waits)]

    def _find_needs(self, computes: Sequence[int], one_queue: bool) -> None:
        never = self.end
        for key, queue in self.queues.items():
            waits = [(at, number) for number, at in enumerate(queue.needed) if at < never]
            if one_queue:
                waits += zip(queue.positions[1:], count())  # for what is in front of it on its queue
            waits += ((at, bisect_left(queue.positions, at) - 1) for at in computes)
            needed = -1
            for at, number in sorted(waits):
                if number > needed:
                    needed = number
                    self.needs.append((at, key, number))
        self.needs.sort()

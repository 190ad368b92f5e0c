"""Lowering: from a compute order to a full plan with communication.

Between two compute operations of a rank lies a *boundary*; boundary i is before operation i. At a boundary stand, in
this order: posts (sends and receives), releases, gradient syncs, waits and hand-offs for the operation that follows,
marks. Each message has a *round*, the logical slot at whose end it is produced (``clock.py``).

``overlap``  A send is posted right after its operation and released ``release_after`` operations later. A receive is
             posted when its message is due, or ``lookahead`` slots ahead of its use if that is earlier, and waited
             right before its use.
``batched``  All messages whose round falls on a boundary go out there as one batch, waited at once (with
             ``variable_shapes``, one per round).
``plain``    The same messages, singly, waited together.

At one boundary receives are posted before sends wherever that is free (one-way channels, and within a batch): gloo
tells a sender that its receive is posted in the stream of data the other way, behind a message that is already on it.

With ``overlap_pairs``, nothing stands between the halves of a pair (``pairs.py``): what they wait for comes before,
what they send after it.

With ``shared`` channels, both ends must post in one order: posts then stand in the order of rounds, no receive ahead of
its round. With ``variable_shapes`` a receive is complete only once its shape has come, so its wait follows it at once,
at its round's boundary: a sender is never held up by a receiver that is in no hurry, and what is posted later on the
channel can not overtake it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron_pp.plan.clock import logical_ends
from megatron_pp.plan.instruction import (
    BACKWARD,
    FORWARD,
    HAND_ACT,
    HAND_GRAD,
    RECV_ACT,
    RECV_GRAD,
    RECV_OPS,
    RELEASE_ACT,
    RELEASE_GRAD,
    SEND_ACT,
    SEND_GRAD,
    SEND_OPS,
    WAIT_ACT,
    WAIT_GRAD,
    Instruction,
    batch,
    instruction,
)
from megatron_pp.plan.marks import marks_of
from megatron_pp.plan.order_check import check_orders
from megatron_pp.plan.pairs import overlap_pairs
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.spec import BATCHED, ONE_WAY, OVERLAP, PlanSpec

Order = Sequence[Instruction]


@dataclass(frozen=True)
class _Codes:
    """The instructions that one compute operation's messages need: activations for FORWARD, gradients for BACKWARD."""

    towards: int  # stages the result travels: +1 or -1
    recv: str
    wait: str
    hand: str
    send: str
    release: str


_CODES = {
    FORWARD: _Codes(1, RECV_ACT, WAIT_ACT, HAND_ACT, SEND_ACT, RELEASE_ACT),
    BACKWARD: _Codes(-1, RECV_GRAD, WAIT_GRAD, HAND_GRAD, SEND_GRAD, RELEASE_GRAD),
}


@dataclass(frozen=True, order=True)
class _Post:
    """One end of one message. Sorted, posts stand in the order in which both ends agree: round, activations first,
    receiving stage, microbatch.
    """

    round: int
    kind: str
    stage: int
    mb: int
    post: Instruction
    finish: Instruction  # the WAIT or RELEASE that belongs to it
    peer: int
    use: int  # for a receive, the operation that consumes it; for a send, the one that produced it


def lower(spec: PlanSpec, placement: Placement, orders: Sequence[Order]) -> list[list[Instruction]]:
    """A full program per rank. Raises PlanError where the orders are not complete or can not run."""
    check_orders(orders, placement, spec.num_microbatches, spec.forward_only)
    if spec.forward_only:
        orders = [[op for op in order if op.op == FORWARD] for order in orders]
    pairs = overlap_pairs(orders) if spec.overlap_pairs and not spec.forward_only else [set() for _ in orders]
    ends = logical_ends(orders, placement, spec.num_microbatches, pairs)
    ended = {
        (op.op, placement.stages[rank][op.chunk], op.mb): ends[rank][i]
        for rank, order in enumerate(orders)
        for i, op in enumerate(order)
        if op.op in _CODES
    }
    return [
        _RankLowering(spec, placement, rank, orders[rank], ends[rank], ended, pairs[rank]).program()
        for rank in range(len(orders))
    ]


class _RankLowering:
    """Lays out one rank's program on its boundaries."""

    def __init__(
        self,
        spec: PlanSpec,
        placement: Placement,
        rank: int,
        order: Order,
        ends: list[int],
        ended: dict[tuple[str, int, int], int],
        pairs: set[int],
    ) -> None:
        self.spec = spec
        self.placement = placement
        self.rank = rank
        self.order = order
        self.ends = ends
        self.ended = ended
        self.inside = {first + 1 for first in pairs}  # boundaries between the halves of a pair: nothing may stand there
        self.posts: dict[int, list[_Post]] = defaultdict(list)
        self.releases: dict[int, list[Instruction]] = defaultdict(list)
        self.inputs: dict[int, list[Instruction]] = defaultdict(list)  # waits and hand-offs

    def program(self) -> list[Instruction]:
        sends, receives = self._messages()
        if self.spec.policy == OVERLAP:
            self._place_late_finishes(sends, receives)
        for send in sends:
            self.posts[self._from(send.use + 1)].append(send)
        for receive, boundary in zip(receives, self._receive_boundaries(receives), strict=True):
            self.posts[boundary].append(receive)
        return self._emit()

    def _messages(self) -> tuple[list[_Post], list[_Post]]:
        """This rank's ends of all messages, sends and receives; hand-offs within the rank go to their place at once."""
        sends, receives = [], []
        for i, (op, chunk, mb, _) in enumerate(self.order):
            codes = _CODES.get(op)
            if codes is None:
                continue
            stage = self.placement.stages[self.rank][chunk]
            source, target = stage - codes.towards, stage + codes.towards
            if 0 <= source < self.placement.num_stages:
                peer = self.placement.homes[source][0]
                if peer == self.rank:
                    self.inputs[self._until(i)].append(instruction(codes.hand, chunk, mb))
                else:
                    due = self.ended[(op, source, mb)]
                    recv, wait = instruction(codes.recv, chunk, mb), instruction(codes.wait, chunk, mb)
                    receives.append(_Post(due, codes.recv[1], stage, mb, recv, wait, peer, i))
            if 0 <= target < self.placement.num_stages:
                peer = self.placement.homes[target][0]
                if peer != self.rank:
                    send, release = instruction(codes.send, chunk, mb), instruction(codes.release, chunk, mb)
                    sends.append(_Post(self.ends[i], codes.send[1], target, mb, send, release, peer, i))
        return sends, receives

    def _place_late_finishes(self, sends: list[_Post], receives: list[_Post]) -> None:
        """Under ``overlap``: releases some operations after their send, waits right before the use.

        An output is released before its own backward at the latest: the gradient that comes back shows that the send is
        done, and what is released then needs no memory in the backward.
        """
        backwards = {(op.chunk, op.mb): i for i, op in enumerate(self.order) if op.op == BACKWARD}
        for send in sends:
            boundary = min(send.use + 1 + self.spec.release_after, len(self.order))
            if send.finish.op == RELEASE_ACT:
                boundary = min(boundary, backwards.get((send.finish.chunk, send.finish.mb), boundary))
            self.releases[self._from(boundary)].append(send.finish)
        if not self.spec.variable_shapes:
            for receive in receives:
                self.inputs[self._until(receive.use)].append(receive.finish)

    def _ahead(self, use: int) -> int:
        """The boundary ``lookahead`` slots before the operation ``use`` starts.

        With one chunk a slot in which the rank idles counts: a buffer that is there before the bubble is early enough,
        and the bubble before a backward of the cooldown is the last rank's forward, as long as a transfer that can be
        hidden at all. With several the clock's bubbles are shorter than transfers may be (simulated: interleaved 1F1B
        on four ranks would take 1.4% longer where a transfer takes as long as a forward).
        """
        if self.placement.num_chunks > 1:
            return max(0, self._until(use) - self.spec.lookahead)
        length = 2 if use in self.inside or use + 1 in self.inside else 1
        return bisect_right(self.ends, self.ends[use] - length - self.spec.lookahead)

    def _from(self, boundary: int) -> int:
        """``boundary``, or where it is inside a pair the one after the pair."""
        return boundary + 1 if boundary in self.inside else boundary

    def _until(self, boundary: int) -> int:
        """``boundary``, or where it is inside a pair the one before the pair."""
        return boundary - 1 if boundary in self.inside else boundary

    def _receive_boundaries(self, receives: list[_Post]) -> list[int]:
        """Where each receive is posted: at its round's boundary, or earlier by look-ahead where channels allow, in the
        sender's order.
        """
        boundaries = [bisect_right(self.ends, receive.round) for receive in receives]
        ahead = self.spec.policy == OVERLAP and self.spec.channels == ONE_WAY and not self.spec.variable_shapes
        if not ahead:
            return boundaries
        by_round = sorted(range(len(receives)), key=lambda k: receives[k].round, reverse=True)
        # Channel -> boundary of the receive that comes after in FIFO order
        earliest_later: dict[tuple[int, str], int] = {}
        for k in by_round:
            receive = receives[k]
            channel = (receive.peer, receive.kind)
            ahead_of_use = self._ahead(receive.use)
            wanted = self._until(min(boundaries[k], ahead_of_use))
            boundaries[k] = min(wanted, earliest_later.get(channel, wanted))
            earliest_later[channel] = boundaries[k]
        return boundaries

    def _emit(self) -> list[Instruction]:
        before, after = marks_of(self.spec, self.rank, self.order)
        program: list[Instruction] = []
        for i in range(len(self.order) + 1):
            posts = self.posts.get(i)
            if posts:
                self._emit_posts(sorted(posts), program)
            program += self.releases.get(i, ())
            program += after.get(i - 1, ())
            if i < len(self.order):
                program += self.inputs.get(i, ())
                program += () if i in self.inside else before.get(i, ())
                program += before.get(i + 1, ()) if i + 1 in self.inside else ()
                program.append(self.order[i])
        return program

    def _emit_posts(self, posts: list[_Post], program: list[Instruction]) -> None:
        if self.spec.policy == BATCHED:
            for together in map(_receives_first, self._batches(posts)):
                program.append(batch(p.post for p in together))
                program += _waits(together) + _releases(together)
        elif self.spec.variable_shapes:
            self._emit_one_by_one(posts, program)
        else:
            program += [p.post for p in (_receives_first(posts) if self.spec.channels == ONE_WAY else posts)]
            if self.spec.policy != OVERLAP:
                program += _waits(posts) + _releases(posts)

    def _batches(self, posts: list[_Post]) -> Iterable[list[_Post]]:
        """All messages of a boundary in one batch; where shapes travel ahead as a batch of their own, a batch per
        round, which the peers' batches match one to one.
        """
        if not self.spec.variable_shapes:
            return [posts]
        return [list(same) for _, same in groupby(posts, key=lambda p: p.round)]

    def _emit_one_by_one(self, posts: list[_Post], program: list[Instruction]) -> None:
        """Every receive waited where it is posted; where channels are one-way, sends need not stand behind it."""
        if self.spec.channels == ONE_WAY:
            posts = sorted(posts, key=lambda p: p.post.op in RECV_OPS)
        for p in posts:
            program += (p.post, p.finish) if p.post.op in RECV_OPS else (p.post,)
        if self.spec.policy != OVERLAP:
            program += _releases(posts)


def _receives_first(posts: list[_Post]) -> list[_Post]:
    """Sends stay in their order, and receives in theirs."""
    return sorted(posts, key=lambda p: p.post.op in SEND_OPS)


def _waits(posts: list[_Post]) -> list[Instruction]:
    return [p.finish for p in posts if p.post.op in RECV_OPS]


def _releases(posts: list[_Post]) -> list[Instruction]:
    return [p.finish for p in posts if p.post.op in SEND_OPS]

"""The ends of messages, which lowering lays out on a rank's boundaries."""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from megatron_pp.plan.ir.instruction import RECV_OPS, SEND_OPS, Instruction, batch
from megatron_pp.plan.ir.spec import ONE_WAY, OVERLAP, PLAIN, PlanSpec

_CHANNEL = itemgetter(*map(Instruction._fields.index, ("op", "peer")))
_new = tuple.__new__  # takes a third of the time of Post(...) and Instruction(...)


class Post(NamedTuple):
    """One end of one message. Sorting puts posts into an order that is the same at both ends: by round, activations
    first, receiving stage, microbatch.
    """

    round: int
    towards: int  # -1 for an activation, so that it comes first
    stage: int
    mb: int
    post: Instruction
    finish: Instruction  # the WAIT or FREE that belongs to it
    use: int  # for a receive, the entry that consumes it; for a send, the one that produced it
    slack: int = 0  # for a send, the slots between its round and the operation that uses it
    place: int = 0  # place in a group of messages: 0 for the first, 1, 2, ... for those with names behind it

    @property
    def channel(self) -> tuple[str, int]:
        """The one-way channel that carries it."""
        return _CHANNEL(self.post)


class Way(NamedTuple):
    """How a result reaches stage ``to``: by the ops ``post`` and ``finish``, to or from rank ``peer``, with messages of
    these ``names`` behind it. ``ends``: (microbatch, part) -> when the operation at the other end ends.
    """

    peer: int
    to: int
    towards: int
    post: str
    finish: str
    ends: dict[tuple[int, int], int]
    names: tuple[str, ...]


def named_posts(way: Way, of: Post) -> Iterable[Post]:
    """The posts of the messages with names that go with the message ``of``."""
    named = ((place, of.post._replace(tensor=name)) for place, name in enumerate(way.names, 1))
    return (of._replace(post=at, finish=at._replace(op=way.finish), place=place) for place, at in named)


def post_of(way: Way, due: int, at: Instruction, use: int, slack: int = 0) -> Post:
    """This rank's end of the message that ``at``, an operation of entry ``use``, needs or makes. ``due``: its round."""
    peer, to, towards, post, finish, _, _ = way
    _, stage, mb, _, chunk, part, _, _ = at
    first = _new(Instruction, (post, stage, mb, peer, chunk, part, "", ()))
    last = _new(Instruction, (finish, stage, mb, peer, chunk, part, "", ()))
    return _new(Post, (due, towards, to, mb, first, last, use, slack, 0))


def receives_first(posts: list[Post]) -> list[Post]:
    """``posts`` with all receives before all sends, each in the same order as before."""
    return [p for p in posts if p.post.op in RECV_OPS] + [p for p in posts if p.post.op in SEND_OPS]


def waits_of(posts: list[Post]) -> list[Instruction]:
    return [p.finish for p in posts if p.post.op in RECV_OPS]


def releases_of(posts: list[Post]) -> list[Instruction]:
    return [p.finish for p in posts if p.post.op in SEND_OPS]


class Exchanges:
    """Posts the messages of a rank's boundaries. ``named``: whether messages with names may be among them."""

    def __init__(self, spec: PlanSpec, looks_ahead: bool, named: bool) -> None:
        self.spec = spec
        self.looks_ahead = looks_ahead
        self.named = named

    def emit(self, posts: list[Post], program: list[Instruction]) -> None:
        """Append the posts of one boundary to ``program``, with the waits that belong to this boundary."""
        if self.spec.grouped:
            for together in map(receives_first, self._batches(posts)):
                program.append(batch(p.post for p in together))
                program += [] if self.spec.policy == OVERLAP else waits_of(together) + releases_of(together)
        elif self.spec.channels == ONE_WAY and not self.spec.may_wait:
            emit = self._emit_named if self.named and any(p.place for p in posts) else self._emit_one_way
            for together in self._completed_in_turn(posts):
                emit(together, program)
        elif self.spec.variable_shapes:
            for p in posts:
                program += (p.post, p.finish) if p.post.op in RECV_OPS else (p.post,)
        else:
            program += [p.post for p in posts]
            program += [] if self.spec.policy == OVERLAP else waits_of(posts)
        if self.spec.policy == PLAIN and not self.spec.grouped:
            program += releases_of(posts)

    def _batches(self, posts: list[Post]) -> Iterable[list[Post]]:
        """All messages of a boundary in one batch; one batch per round, as at peers, if shapes are sent ahead."""
        if not self.spec.variable_shapes:
            return [posts]
        return [list(same) for _, same in groupby(posts, key=lambda p: p.round)]

    def _completed_in_turn(self, posts: list[Post]) -> list[list[Post]]:
        """All messages of a boundary. If shapes are sent ahead, messages of rounds before the last send's come first,
        because the shape of that send blocks a hardware queue.
        """
        if not self.spec.variable_shapes:
            return [posts]
        last = max((p.round for p in posts if p.post.op in SEND_OPS), default=0)
        early = [p for p in posts if p.round < last]
        return [early, posts[len(early) :]] if any(p.post.op in RECV_OPS for p in early) else [posts]

    def _emit_one_way(self, posts: list[Post], program: list[Instruction]) -> None:
        """Append receives, sends, then waits; behind a wait the next receive of its channel."""
        if self.looks_ahead:  # receives that follow others on their channel are placed already
            program += [p.post for p in receives_first(posts)]
            return
        receives = [p for p in posts if p.post.op in RECV_OPS]
        first: dict[tuple[str, int], Post] = {}
        for p in receives:
            first.setdefault(p.channel, p)
        program += [p.post for p in first.values()]
        program += [p.post for p in posts if p.post.op in SEND_OPS]
        for p in receives:
            program += (p.finish,) if first[p.channel] is p else (p.post, p.finish)

    def _emit_named(self, posts: list[Post], program: list[Instruction]) -> None:
        """The same for posts of which some have names. On one hardware queue a message waits for the one before it on
        its channel. So within a round messages go out in the order of their places, which is the same on all ranks.
        """
        first: dict[tuple[str, int], Post] = {}
        for p in posts:
            first.setdefault(p.channel, p)
        at_once = [p for p in posts if (p.post.op in SEND_OPS and not p.place) or first[p.channel] is p]
        program += [p.post for p in receives_first(at_once)]
        each_by_itself = self.spec.variable_shapes  # a receive is not complete before its shape came
        ordered = sorted(posts, key=lambda p: (p.round, p.place))
        for _, same in groupby(ordered, key=lambda p: (p.round, p.place if each_by_itself else 0)):
            together = list(same)
            program += [p.post for p in together if p not in at_once]
            program += waits_of(together)

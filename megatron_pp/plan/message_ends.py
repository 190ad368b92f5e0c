"""Ends of messages, as lowering lays them out on a rank's boundaries."""

from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

from megatron_pp.plan.instruction import RECV_OPS, SEND_OPS, Instruction

_CHANNEL = itemgetter(*map(Instruction._fields.index, ("op", "peer")))
_new = tuple.__new__  # in a third of the time of Post(...) and Instruction(...)


class Post(NamedTuple):
    """One end of one message. Sorted, posts stand in the order in which both ends agree: round, activations first,
    receiving stage, microbatch.
    """

    round: int
    towards: int  # -1 for an activation, so that it comes first
    stage: int
    mb: int
    post: Instruction
    finish: Instruction  # the WAIT or FREE that belongs to it
    use: int  # for a receive, the entry that consumes it; for a send, the one that produced it
    slack: int = 0  # for a send, the slots between its round and the operation that uses it
    place: int = 0  # in its message: 0, and of the named tensors that go with it 1, 2, ...

    @property
    def channel(self) -> tuple[str, int]:
        """Among the one-way channels of its rank."""
        return _CHANNEL(self.post)


class Way(NamedTuple):
    """How a result goes to stage ``to``: by way of ``post`` and ``finish``, to or from rank ``peer``, and with it the
    tensors ``names``; ``ends``, by microbatch and slice: of the operation that produces what comes, or that uses what
    is sent.
    """

    peer: int
    to: int
    towards: int
    post: str
    finish: str
    ends: dict[tuple[int, int], int]
    names: tuple[str, ...]


def named_posts(way: Way, of: Post) -> Iterable[Post]:
    """Those of the named tensors that go with the message ``of``."""
    named = ((place, of.post._replace(tensor=name)) for place, name in enumerate(way.names, 1))
    return (of._replace(post=at, finish=at._replace(op=way.finish), place=place) for place, at in named)


def post_of(way: Way, due: int, at: Instruction, use: int, slack: int = 0) -> Post:
    """This rank's end of the message that ``at``, of its entry ``use``, needs or makes; ``due``: its round."""
    peer, to, towards, post, finish, _, _ = way
    _, stage, mb, _, chunk, part, _, _ = at
    first = _new(Instruction, (post, stage, mb, peer, chunk, part, "", ()))
    last = _new(Instruction, (finish, stage, mb, peer, chunk, part, "", ()))
    return _new(Post, (due, towards, to, mb, first, last, use, slack, 0))


def receives_first(posts: list[Post]) -> list[Post]:
    """Sends stay in their order, and receives in theirs."""
    return [p for p in posts if p.post.op in RECV_OPS] + [p for p in posts if p.post.op in SEND_OPS]


def waits_of(posts: list[Post]) -> list[Instruction]:
    return [p.finish for p in posts if p.post.op in RECV_OPS]


def releases_of(posts: list[Post]) -> list[Instruction]:
    return [p.finish for p in posts if p.post.op in SEND_OPS]

"""Lowering: from a compute order to a full plan with communication.

*Boundary* i of a rank's order is before its entry i. It has, in this order: posts (sends and receives), releases,
gradient syncs, copies between device and host memory, waits and hand-offs for the entry (in the order of rounds), other
syncs. A message's *round* is the logical slot at whose end it is made (``clock.py``).

``overlap``  A send is posted right after its operation, and its buffer is released ``release_after`` entries later. A
             receive is posted when its message is due, or ``lookahead`` slots ahead of its use if that is earlier, but
             behind the operations of its rank on which the message depends. The wait is right before the use.
``batched``  All messages whose round is at a boundary go out there as one batch, and the rank waits for it there (with
             ``variable_shapes`` there is one batch per round).
``plain``    The same messages go out singly, and the rank waits for all of them together.

On a one-way channel a receive is posted after the wait for the receive before it: with one hardware queue it would
block compute until then. An exception under ``overlap`` is a receive that is due long before the use of the one before
it. It is posted as late as its sender allows. What then blocks the queue has an earlier round, so nothing hangs.

If any instruction may wait for an idle device (ANY_WAIT), receives are posted as early as no such wait can hang, and at
one boundary in an order in which none can hang (``turns.py``). The next paragraphs are about plans without ANY_WAIT.

At one boundary receives are posted before sends if the order is free (on one-way channels, and within a batch). gloo
announces a receive in the data of the other direction, behind any message that was posted before it.

Operations that a feature joins are one entry: waits for them come before it, their sends after it. If receives are
posted ahead and no device is synchronised, sends go out within the entry, each when its operation has made the tensor.
The round of all these messages is the entry's end, because in whole slots no other rank can use one of them earlier.

If exchanges block, neighbours wait for each other at each boundary. In an interleaved order one of them may run a
forward while the other runs a backward, and each slot would then take as long as the longer of the two. With ``joint``,
a forward and the backward behind it have one exchange, at the end of both, as in Megatron's interleaved schedule
without overlap. A message whose round is within the two waits for that end. This cannot hang: of all ranks that wait,
take the one at the earliest boundary. It waits for messages of that round or the one before. Their other ends are at
most one slot later, behind an entry that begins before it.

With ``shared`` channels both ends must post in the same order: by rounds, and no receive ahead of its round. With
``variable_shapes`` a receive is complete only once its shape has come, so the wait is at its round's boundary: a slow
receiver then does not block the sender, and no later message on the channel overtakes this one.

Messages with names follow another one on its channel, and on one hardware queue each waits for the one before it. So
all ranks post them in the same order, by round and place in the message: at their round's boundary, behind the other
posts, and before instructions that wait for that round.

With STATIC_BUFFERS a gradient is released before the operation after the next backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_pp.common.gc_pause import collector_paused
from megatron_pp.plan.ir.dataflow import MOVES, RESULT_OF, TOWARDS, consumer_of, source_of
from megatron_pp.plan.ir.feature import hooks_of
from megatron_pp.plan.ir.instruction import (
    BACKWARD_OPS,
    FORWARD,
    FREE_F,
    NONE,
    SEND_OPS,
    SENT_BY,
    Instruction,
    each,
    join,
    joined,
    numbered,
    placed,
)
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.repeated import Line, Lines
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_WAY, OVERLAP, STATIC_BUFFERS, Plan, PlanSpec
from megatron_pp.plan.lower.boundaries import Exchanges, Post, Way, named_posts, post_of
from megatron_pp.plan.lower.clock import Clocked, run_clock
from megatron_pp.plan.lower.order_check import check_orders, run_of
from megatron_pp.plan.lower.syncs import syncs_of
from megatron_pp.plan.lower.turns import Turns

if TYPE_CHECKING:
    from megatron_pp.plan.hooks import PlanHooks

Order = Sequence[Instruction]
_Turn = tuple[int, int, int]  # order at one boundary: round, one of the values below, place in the message
_POSTS, _WAITS, _BEHIND_WAITS = range(3)
_COLLECTIVE = 2  # stands in place of a message's direction
_FIRST, _SECOND = itemgetter(0), itemgetter(1)


class _Site(NamedTuple):
    """How an operation gets its input (from this rank, or by a receive), and where its result is sent."""

    hand: str | None
    came: Way | None
    went: Way | None


def lowered(
    spec: PlanSpec,
    placement: Placement,
    orders: Sequence[Order],
    remark: str = "",
    settings: Mapping[str, Any] | None = None,
    joint: bool = False,
) -> Plan:
    """The unverified plan of ``orders``, which may be placed or not. Each rank's program is laid out on first use.

    ``settings``: those of features, by default those of ``spec``. ``joint``: if exchanges block, a forward and the
    backward behind it have one exchange. Raises PlanError for orders that are not complete or cannot run.
    """
    check_orders(orders, placement, spec)
    lines = [placement.place(rank, order) for rank, order in enumerate(orders)]
    run = [run_of(order, spec) for order in lines] if spec.forward_only else lines
    settings = dict(spec.added) if settings is None else settings
    added = hooks_of(settings.items(), placement.barriers)
    joins = None if spec.forward_only else next((found for hooks in added if (found := hooks.joins(spec))), None)
    joint = joint and joins is None and (spec.policy != OVERLAP or spec.variable_shapes)
    if joint:
        joins = _jointly
    if joins is not None:
        run = [join(order, joins) for order in run]
    clocked = run_clock(run, placement)
    if joint:  # each operation by itself, both with the end of the two
        ends = [[end[i] for i, _ in numbered(order)] for order, end in zip(clocked.orders, clocked.ends, strict=True)]
        clocked = clocked._replace(orders=[list(each(order)) for order in clocked.orders], ends=ends)
    for hooks in added:
        hooks.check_lowered(spec, settings)
    programs = _Programs(spec, placement, clocked, settings, added)
    return Plan(spec, placement, programs, tuple(lines), remark)


def _jointly(first: Instruction, second: Instruction) -> Instruction | None:
    """A forward and a backward with one exchange as one entry, which only the clock sees."""
    is_joint = first.op == FORWARD and second.op in BACKWARD_OPS
    return Instruction("", members=(first, second)) if is_joint else None


class _Programs(Lines):
    def __init__(
        self,
        spec: PlanSpec,
        placement: Placement,
        clocked: Clocked,
        settings: Mapping[str, Any],
        added: Sequence[PlanHooks],
    ) -> None:
        super().__init__(spec.pipeline_size)
        self.spec = spec
        self.placement = placement
        self.clocked = clocked
        self.settings = settings
        self.added = added
        self.has_names = any(hooks.has_names(spec) for hooks in added)
        self.looks_ahead = spec.policy == OVERLAP and spec.channels == ONE_WAY and not spec.variable_shapes

    @cached_property
    def turns(self) -> Turns | None:
        """The turns by which receives are posted. None if no instruction waits for the device, or exchanges block."""
        spec = self.spec
        if not self.looks_ahead or not spec.may_wait:
            return None
        ahead = spec.lookahead > 0 and DEVICE_SYNC not in spec.device and not self.has_names
        return Turns(self.clocked, self.placement, ahead, spec.measured)

    @collector_paused()
    def _make(self, rank: int) -> Line:
        return tuple(RankLowering(self, rank).program())


def _in_turn(inputs: list[tuple[_Turn, Instruction]]) -> Iterable[Instruction]:
    return (inputs[0][1],) if len(inputs) == 1 else map(_SECOND, sorted(inputs, key=_FIRST))


class RankLowering:
    """Lays out one rank's program on its boundaries. Features place their instructions by ``PlanHooks.lay_out``."""

    def __init__(self, programs: _Programs, rank: int) -> None:
        spec, placement, clocked = programs.spec, programs.placement, programs.clocked
        self.spec = spec
        self.settings = programs.settings
        self.added = programs.added
        self.has_names = programs.has_names
        self.placement = placement
        self.rank = rank
        self.clocked = clocked
        self.turns = programs.turns
        self.order = clocked.orders[rank]
        self.ends = clocked.ends[rank]
        self.rounds = self.ends if self.turns is None else self.turns.of_rank[rank]  # of the messages of each entry
        self.result_ends = clocked.result_ends
        self.several_chunks = placement.num_chunks > 1
        self.looks_ahead = programs.looks_ahead
        self.sends_within = self.looks_ahead if self.turns is None else self.turns.ahead
        self.exchanges = Exchanges(spec, self.looks_ahead, self.has_names)
        self.within: dict[tuple[int, str], Instruction] = {}  # (entry of joined operations, op) -> the op's send
        # Tables with a boundary as their key:
        self.posts: dict[int, list[Post]] = defaultdict(list)
        self.receives: dict[int, list[Post]] = defaultdict(list)  # receives that come before all other posts
        self.in_turn: dict[int, list[Post]] = defaultdict(list)  # all posts, if they are placed by turns
        self.waits_ahead: dict[Instruction, Instruction] = {}  # a post placed by its turn -> the wait right before it
        self.releases: dict[int, list[Instruction]] = defaultdict(list)
        self.collectives: dict[int, list[tuple[int, Instruction]]] = defaultdict(list)  # (round, post) of each
        self.placed_collectives = 0
        # Hand-offs, waits, and receives that follow others, each with the round for which it may have to wait.
        self.inputs: dict[int, list[tuple[_Turn, Instruction]]] = defaultdict(list)
        self.behind: dict[Instruction, list[Post]] = {}  # a receive -> the receives with names that follow it
        self.copies: dict[int, list[Instruction]] = defaultdict(list)
        self.before_entry: dict[int, list[Instruction]] = defaultdict(list)  # right before the entry
        self.backwards: dict[tuple[int, int, int], int] = {}  # (stage, microbatch, part) -> the entry of its backward
        self._sites: dict[tuple[str, int], _Site] = {}  # (op, stage) -> site

    def program(self) -> list[Instruction]:
        sends, receives = self._messages()
        if self.spec.policy == OVERLAP:
            self._place_releases(sends)
        if self.turns is not None:
            self._place_in_turn(self.turns, sends, receives)
        else:
            self._place_in_rounds(sends, receives)
        for hooks in self.added:
            hooks.lay_out(self)
        program = self._emit()
        for hooks in self.added:
            program = hooks.laid_out(self, program)
        return program

    def _place_in_rounds(self, sends: list[Post], receives: list[Post]) -> None:
        order, posts, sends_within = self.order, self.posts, self.sends_within
        for send in sends:
            use = send.use
            if send.place and self.looks_ahead:
                self.inputs[use + 1].append(((send.round, _POSTS, send.place), send.post))
            elif sends_within and order[use].members:
                self.within[(use, send.post.op)] = send.post
            else:
                posts[self._behind(use)].append(send)
        if self.spec.policy == OVERLAP and (not self.spec.variable_shapes or self.spec.grouped):
            for one in self._with_named(receives):
                self._wait_before_use(one)
        if self.looks_ahead:
            self._place_ahead(receives)
        else:
            for receive in self._with_named(receives):
                self.posts[self._due(receive)].append(receive)

    def _place_in_turn(self, turns: Turns, sends: list[Post], receives: list[Post]) -> None:
        """Place posts at the boundaries and in the order of ``turns``, for plans in which any instruction may wait."""
        for send in sends:
            if self.sends_within and self.order[send.use].members:
                self.within[(send.use, send.post.op)] = send.post
            else:
                self.in_turn[send.use + 1].append(send)
        before: dict[tuple[str, int], Post] = {}  # channel -> its last receive, if no wait for it was placed yet
        for receive in self._with_named(receives):
            boundary = turns.boundary(self.rank, receive.round)
            self.in_turn[boundary].append(receive)
            waited = before.pop(receive.channel, None)
            if waited is not None and waited.use == boundary:  # what is posted behind it would wait for it anyway
                self.waits_ahead[receive.post] = waited.finish
            elif waited is not None:
                self._wait_before_use(waited)
            before[receive.channel] = receive
        for waited in before.values():
            self._wait_before_use(waited)

    def _wait_before_use(self, receive: Post) -> None:
        self.inputs[receive.use].append(((receive.round, _WAITS, receive.place), receive.finish))

    def _messages(self) -> tuple[list[Post], list[Post]]:
        """This rank's sends and receives, in the order of rounds. Places its hand-offs immediately."""
        sends: list[Post] = []
        receives: list[Post] = []
        sites, ends, inputs, backwards = self._sites, self.ends, self.inputs, self.backwards
        rounds, turns = self.rounds, self.turns
        for i, entry in enumerate(self.order):
            for at in entry.members or (entry,):
                op, stage, mb, _, chunk, part, _, _ = at
                hand, came, went = sites.get((op, stage)) or self._site(op, stage)
                if op in BACKWARD_OPS:
                    backwards[(stage, mb, part)] = i
                if hand is not None:
                    inputs[i].append(((0, _POSTS, 0), placed(hand, stage, mb, NONE, chunk, part)))
                elif came is not None:
                    due = came.ends[(mb, part)]
                    if turns is not None:
                        due = turns.of(due, came.peer)
                    receives.append(post_of(came, due, at, i))
                    if came.names:
                        self.behind[receives[-1].post] = list(named_posts(came, receives[-1]))
                if went is not None:
                    slack = went.ends[(mb, part)] - 1 - ends[i]
                    sends.append(post_of(went, rounds[i], at, i, slack if slack > 0 else 0))
                    if went.names:
                        sends += named_posts(went, sends[-1])
        return sorted(sends), sorted(receives)

    def _site(self, op: str, stage: int) -> _Site:
        hand, came, went, num_stages = None, None, None, self.placement.num_stages
        source, target = source_of(op, stage, num_stages), consumer_of(op, stage, num_stages)
        if source is not None:
            moves = MOVES[RESULT_OF[op]]
            came = self._way(RESULT_OF[op], source, stage, moves.recv, moves.wait)
            hand = moves.hand if came.peer == self.rank else None
        if target is not None:
            moves = MOVES[RESULT_OF[op]]
            went = self._way(RESULT_OF[op], stage, target, moves.send, moves.free)
        site = self._sites[(op, stage)] = _Site(hand, came, went if went and went.peer != self.rank else None)
        return site

    def _way(self, result: str, source: int, target: int, post: str, finish: str) -> Way:
        other = target if post in SEND_OPS else source
        home = self.placement.homes[other]
        edge = min(source, target)
        names = tuple(name for hooks in self.added for name in hooks.names(self.spec, self.placement, result, edge))
        ends = self.result_ends if self.turns is None or post in SEND_OPS else self.turns.clocked.result_ends
        return Way(home[0], target, -TOWARDS[result], post, finish, ends[(result, other)], names)

    def _place_releases(self, sends: list[Post]) -> None:
        """Place releases: under ``overlap`` some entries after the send, and with several chunks on a rank up to P / 2
        more for messages that arrive too early. If a backward takes longer than a forward, which the clock does not
        know, two ranks reach a round up to P / 2 operations apart, and the receive is posted that much later. (In the
        simulator, interleaved 1F1B with P=16 V=4 M=64, groups of 32 and backwards of two forwards takes 9.5% longer.)

        An output is released before its own backward at the latest: the gradient that comes back shows that the send is
        done, and the backward does not need the output's data.
        """
        backwards = self.backwards
        turns = sorted(set(backwards.values())) if STATIC_BUFFERS in self.spec.device else []
        last, after, releases = len(self.order), self.spec.release_after, self.releases
        apart = self.spec.pipeline_size // 2 if self.several_chunks else 0
        for send in sends:
            finish, use = send.finish, send.use
            boundary = self._behind(use) + after + (send.slack if send.slack < apart else apart)
            if finish.op == FREE_F:
                latest = backwards.get((finish.stage, finish.mb, finish.part), last)
            else:
                following = bisect_right(turns, use)
                latest = turns[following] + 1 if following < len(turns) else last
            boundary = min(boundary, latest, last)
            if boundary == use + 1 < last:  # right before its backward: behind the wait for the gradient
                self.inputs[boundary].append(((self.rounds[boundary], _POSTS, send.place), finish))
            else:
                releases[boundary].append(finish)

    def place_collective(self, boundary: int, due: int, post: Instruction, wait: Instruction, use: int | None) -> None:
        """``post`` goes out at ``boundary``, in its ``due`` round, and is waited for by the entry ``use``; None: one
        entry behind its post.
        """
        use = boundary + 1 if use is None else use
        if self.turns is None:
            self.collectives[boundary].append((due, post))
        else:
            due = self.turns.last_of(due)
            count = self.placed_collectives
            self.in_turn[boundary].append(Post(due, _COLLECTIVE, count, NONE, post, wait, use))
        self.placed_collectives += 1
        if use < len(self.order):
            self.inputs[use].append(((due, _WAITS, 0), wait))
        else:
            self.releases[len(self.order)].append(wait)

    def ahead(self, use: int) -> int:
        """The boundary ``lookahead`` slots before the entry ``use`` starts.

        With one chunk idle slots count: a buffer before the bubble is early enough, as the bubble before a backward of
        the cooldown is the last rank's forward, as long as any transfer that can be hidden. With several chunks the
        clock's bubbles may be shorter than transfers (simulated: interleaved 1F1B on four ranks would take 1.4% longer
        where a transfer takes as long as a forward).
        """
        if self.several_chunks:
            return max(0, use - self.spec.lookahead)
        length = len(self.order[use].members) or 1
        return bisect_right(self.ends, self.ends[use] - length - self.spec.lookahead)

    def _with_named(self, receives: list[Post]) -> Iterable[Post]:
        """The receives, each followed by the receives with names that belong to it."""
        return (one for at in receives for one in (at, *self.behind.get(at.post, ()))) if self.behind else receives

    def _due(self, receive: Post) -> int:
        """The boundary of the receive's round. If the round is within joint operations, the boundary behind them."""
        due = bisect_right(self.ends, receive.round)
        behind = self._behind(due)
        return behind if behind == due + 2 and self.ends[due] - 2 < receive.round else due

    def _behind(self, use: int) -> int:
        """The boundary behind the entry ``use``; of two joint operations, which end in one slot, behind the second."""
        return use + (2 if self.ends[use + 1 : use + 2] == [self.ends[use]] else 1)

    def _place_ahead(self, receives: list[Post]) -> None:
        """Post each receive when it is due, or earlier by look-ahead, but behind the wait for the one before it on its
        channel. If that is too late, post it when it is due, or as late as the sender allows.
        """
        lines: dict[tuple[str, int], list[Post]] = defaultdict(list)
        ends, inputs, ahead = self.ends, self.inputs, self.ahead
        posts = self.posts if self.has_names or self.placement.barriers else self.receives
        where = self.clocked, self.placement, self.rank
        for receive in receives:
            lines[receive.channel].append(receive)
        for line in lines.values():
            before: Post | None = None
            for receive, after in zip_longest(line, line[1:]):
                boundary = due = bisect_right(ends, receive.round)
                wanted = ahead(receive.use)
                if due < wanted:
                    wanted = due
                elif wanted < bisect_right(ends, receive.round - 1):
                    from megatron_pp.plan.lower import causes

                    wanted = causes.behind_causes(*where, wanted, receive.post.peer, receive.round)
                if before is None or (used := before.use) < wanted:
                    posts[wanted].append(receive)
                elif used <= due or (boundary := self._latest(receive, after)) == due:
                    inputs[min(used, due)].append(((before.round, _BEHIND_WAITS, 0), receive.post))
                else:
                    posts[boundary].append(receive)
                for named in self.behind.get(receive.post, ()) if self.behind else ():
                    self.inputs[boundary].append(((receive.round, _POSTS, named.place), named.post))
                before = receive

    def _latest(self, receive: Post, after: Post | None) -> int:
        """The last boundary at which nothing waits for the receive. It is one slot after its round, while the sender
        runs another operation. It is the round itself if the channel's next send belongs to that operation, or if
        messages with names follow.
        """
        at_once = receive.post in self.behind or (after is not None and after.round == receive.round + 1)
        return min(bisect_right(self.ends, receive.round + (0 if at_once else 1)), receive.use)

    def _emit(self) -> list[Instruction]:
        before, after = syncs_of(self.spec, self.rank, self.order)
        copies, before_entry = self.copies, self.before_entry
        program: list[Instruction] = []
        collectives, receives, posts = self.collectives, self.receives, self.posts
        releases, inputs, in_turn = self.releases, self.inputs, self.in_turn
        alone = self.looks_ahead  # whether the post at this boundary is the only one
        for i, entry in enumerate((*self.order, None)):
            if i in in_turn:
                self._emit_in_turn(in_turn[i], program)
            if i in collectives:
                self._emit_with_collectives(i, program)
            if i in receives:
                program += [receive.post for receive in sorted(receives[i])]
            if i in posts:
                here = posts[i]
                if alone and len(here) == 1:
                    program.append(here[0].post)
                else:
                    self.exchanges.emit(sorted(here), program)
            if entry is None and i in inputs:
                program += _in_turn(inputs[i])
            if i in releases:
                program += releases[i]
            if i - 1 in after:
                program += after[i - 1]
            if i in copies:
                program += copies[i]
            if entry is not None:
                if i in inputs:
                    program += _in_turn(inputs[i])
                if i in before_entry:
                    program += before_entry[i]
                if i in before:
                    program += before[i]
                program.append(self._with_sends(i, entry) if entry.members else entry)
        return program

    def _emit_in_turn(self, posts: list[Post], program: list[Instruction]) -> None:
        assert self.turns is not None
        for at in sorted(posts, key=self.turns.place_of):
            if at.post in self.waits_ahead:
                program.append(self.waits_ahead[at.post])
            program.append(at.post)

    def _with_sends(self, i: int, entry: Instruction) -> Instruction:
        """The entry with the sends that go out within joined operations."""
        found = ((at, self.within.get((i, SENT_BY[at.op]))) for at in entry.members)
        return joined(entry.op, (at for both in found for at in both if at is not None))

    def _emit_with_collectives(self, i: int, program: list[Instruction]) -> None:
        """Emit messages and collectives in the order of rounds, so that all before one that waits are posted."""
        posts = sorted(self.posts.pop(i, ()))
        for due, post in self.collectives[i]:
            before = [p for p in posts if p.round < due]
            if before:
                self.exchanges.emit(before, program)
            program.append(post)
            posts = posts[len(before) :]
        if posts:
            self.exchanges.emit(posts, program)

"""Turns: the order in which the operations of all ranks end. If any instruction may wait, receives are posted by it.

Any instruction may wait for an idle device (ANY_WAIT in ``plan/ir/spec.py``). It then waits for all that its rank has
posted: for the operations that make the messages of its receives, and for the receives of its sends at other ranks. If
such waits form a circle, the plan hangs.

The *turn* of an operation is its place in one order of all operations of all ranks, by their ends on a clock
(``clock.py``). Of two that end together the one of the lower rank comes first. An operation always comes behind all
that it depends on, whatever times the clock has. Turns give two rules:

- A receive is posted right before the first operation of its rank that has a later turn than the operation that makes
  its message. That is the operation that runs while the message is made.
- Messages at one boundary are posted in the order of the turns at which they are made. Sends of the operation that has
  just ended are among them.

Then every wait is for something with an earlier turn, so waits form no circle: a receive is just before the operation
that makes its message, and a send just behind it. docs/proofs.md has the argument.

Any clock would do. This one has times like those of a real step, so that a receive is posted about when its transfer
can begin. They are the times that the plan was searched for, if there are any. Otherwise a full backward takes twice as
long as a forward, and transfers take some time.

Without ``ahead``, operations take one slot each and transfers no time. A receive is then posted behind every operation
of its rank that ends together with the one that makes its message. The posts of one slot go out by their place in the
message, because messages with names follow another one on its channel, where each waits for the one before it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from megatron_pp.plan.ir.instruction import BACKWARD, PASS_OPS
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.lower.boundaries import Post
from megatron_pp.plan.lower.clock import Clocked, run_clock

if TYPE_CHECKING:
    from megatron_pp.plan.costs.measured import Measured

_LONGEST = 1 << 20  # the longest operation that was measured


class Turns:
    """The turns of all operations of ``clocked``: integers that grow along each rank's order. ``measured``: the times
    that the plan was searched for."""

    def __init__(self, clocked: Clocked, placement: Placement, ahead: bool, measured: Measured | None = None) -> None:
        self.size = placement.pipeline_size
        self.ahead = ahead
        self.clocked = clocked
        if ahead:
            times = _Usual() if measured is None else _Measured(measured, placement.num_stages)
            self.clocked = run_clock(clocked.orders, placement, times.took, times.transfer)
        self.of_rank = [[self.of(end, rank) for end in ends] for rank, ends in enumerate(self.clocked.ends)]

    def of(self, end: int, rank: int) -> int:
        """The turn of the operation of ``rank`` that ends at ``end``."""
        return end * self.size + rank

    def last_of(self, end: int) -> int:
        """The last turn of an operation that ends at ``end``."""
        return end * self.size + self.size - 1

    def boundary(self, rank: int, turn: int) -> int:
        """The boundary at which ``rank`` posts the receive of a message that is made at ``turn``."""
        return bisect_right(self.of_rank[rank], turn if self.ahead else self.last_of(turn // self.size))

    def place_of(self, post: Post) -> tuple[int, ...]:
        """The key by which the posts of one boundary are sorted."""
        return (post.round // self.size, post.place, post.round, post.towards, post.stage, post.mb)


class _Usual:
    """The clock's times if none were measured."""

    transfer = 1

    def took(self, op: str, _stage: int, _mb: int, _part: int) -> int:
        """The time of an operation: 4 for a forward, an input gradient or a weight gradient."""
        if op == BACKWARD:
            return 8
        return 2 if op in PASS_OPS else 4


class _Measured:
    """The clock's times as they were measured, as integers of at least 1, because turns must grow along every rank's
    order, and from each operation to those that need it."""

    def __init__(self, measured: Measured, num_stages: int) -> None:
        in_parts, _ = measured.in_parts()  # times as parts of the longest one, so that the unit does not matter
        self.costs = in_parts.costs(num_stages)
        self.transfer = round(in_parts.transfer * _LONGEST)

    def took(self, op: str, stage: int, mb: int, _part: int) -> int:
        share = self.costs.microbatches[mb] if self.costs.microbatches else 1.0
        return max(1, round(self.costs.of(op, stage) * share * _LONGEST))

"""Orders in which a backward overtakes a forward that cannot run yet."""

from megatron_pp.plan.ir.dataflow import inputs_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders.family import Order
from megatron_pp.plan.orders.free_ranks import FreeRanks


def let_backwards_overtake(orders: list[Order], placement: Placement) -> list[Order]:
    """Run ``orders`` slot by slot. If a rank's next operation is a forward without its input, and its next backward
    could run, the backward runs first. This never costs memory, and the order among backwards does not change.

    With a last group shorter than P, strict alternation can wait in a circle: a rank runs its next backward only after
    a forward, and the input of this forward comes after that same backward on another rank.
    """
    ranks = _SlotBySlot(orders, placement)
    # If operations are left, they wait in another circle; the clock names it.
    return [ran + left[::-1] for ran, left in zip(ranks.run(), ranks.todo, strict=True)]


class _SlotBySlot(FreeRanks):
    def __init__(self, orders: list[Order], placement: Placement) -> None:
        super().__init__(placement, {FORWARD: 1, BACKWARD: 1})
        self.todo = [order[::-1] for order in orders]  # next operation last

    def choose(self, rank: int, now: int) -> Instruction | None:
        todo = self.todo[rank]
        if not todo or self._is_ready(rank, todo[-1], now):
            return todo.pop() if todo else None
        if todo[-1].op == FORWARD:
            for i in range(len(todo) - 1, -1, -1):
                if todo[i].op == BACKWARD:
                    return todo.pop(i) if self._is_ready(rank, todo[i], now) else None
        return None

    def _is_ready(self, rank: int, at: Instruction, now: int) -> bool:
        op, _stage, mb, _peer, chunk, part, _tensor, _members = at
        inputs = inputs_of(op, self.placement.stages[rank][chunk], self.placement.num_stages)
        return self.are_there(inputs, mb, part, now)

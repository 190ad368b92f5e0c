"""Orders in which a backward overtakes a forward that cannot run yet."""

from megatron_pp.plan.ir.dataflow import inputs_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders.family import Order
from megatron_pp.plan.orders.free_ranks import FreeRanks


def let_backwards_overtake(orders: list[Order], placement: Placement) -> list[Order]:
    """Run ``orders`` slot by slot; where a rank's next operation is a forward without its input and its next backward
    could run, run that. It never costs memory, and the order among backwards stays as it was.

    With a last group shorter than P, a strict alternation can wait in a circle: a rank holds back its next backward for
    a forward whose input is behind that very backward on another rank.
    """
    ranks = _SlotBySlot(orders, placement)
    # What is left waits in a circle of another kind; the clock names what is wrong.
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

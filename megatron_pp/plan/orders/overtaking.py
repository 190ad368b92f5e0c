"""Orders in which a backward overtakes a forward that cannot run yet."""

from megatron_pp.plan.ir.dataflow import RESULT_OF, inputs_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders.family import Order


def let_backwards_overtake(orders: list[Order], placement: Placement) -> list[Order]:
    """Run ``orders`` slot by slot; where a rank's next operation is a forward without its input and its next backward
    could run, run that. It never costs memory, and the order among backwards stays as it was.

    With a last group shorter than P, a strict alternation can wait in a circle: a rank holds back its next backward for
    a forward whose input is behind that very backward on another rank.
    """
    return _SlotBySlot(orders, placement).run()


class _SlotBySlot:
    def __init__(self, orders: list[Order], placement: Placement) -> None:
        self.stages = placement.stages
        self.num_stages = placement.num_stages
        self.todo = [list(reversed(order)) for order in orders]  # next operation last
        self.done: set[tuple[str, int, int, int]] = set()  # FORWARD or BACKWARD, stage, microbatch, slice
        self.result: list[Order] = [[] for _ in orders]

    def run(self) -> list[Order]:
        while any(self.todo):
            chosen = {rank: self._choose(rank) for rank in range(len(self.todo))}
            ran = [(rank, self.todo[rank].pop(at)) for rank, at in chosen.items() if at is not None]
            if not ran:  # the circle is not of this kind: hand on what is left; the clock names what is wrong
                return [done + todo[::-1] for done, todo in zip(self.result, self.todo, strict=True)]
            for rank, at in ran:
                self.result[rank].append(at)
                self.done.add((RESULT_OF[at.op], self.stages[rank][at.chunk], at.mb, at.slice))
        return self.result

    def _choose(self, rank: int) -> int | None:
        """Where in ``todo[rank]`` the operation of this slot stands; None where the rank has to idle."""
        todo = self.todo[rank]
        if not todo:
            return None
        if self._ready(rank, todo[-1]):
            return -1
        if todo[-1].op != FORWARD:
            return None
        backward = next((i for i in range(-1, -len(todo) - 1, -1) if todo[i].op == BACKWARD), None)
        return backward if backward is not None and self._ready(rank, todo[backward]) else None

    def _ready(self, rank: int, at: Instruction) -> bool:
        op, _, mb, _, chunk, part, _, _ = at
        for kind, stage in inputs_of(op, self.stages[rank][chunk], self.num_stages):
            if (kind, stage, mb, part) not in self.done:
                return False
        return True

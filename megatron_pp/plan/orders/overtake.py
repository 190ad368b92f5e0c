"""Let backwards overtake forwards that cannot run yet: what makes ragged groups of an interleaved order run at all.

With a last group shorter than P, a strict alternation can wait in a circle: a rank holds back its next backward for a
forward whose input is behind that very backward on another rank. Running the backward first breaks the circle and never
costs memory.
"""

from __future__ import annotations

from megatron_pp.plan.dataflow import RESULT_OF, inputs_of
from megatron_pp.plan.family import Order
from megatron_pp.plan.instruction import BACKWARD, FORWARD, Instruction
from megatron_pp.plan.placement import Placement


def let_backwards_overtake(orders: list[Order], placement: Placement) -> list[Order]:
    """Run ``orders`` slot by slot; where a rank's next operation is a forward without its input and its next backward
    could run, run that.

    The order among forwards and the order among backwards stay as they were, so gradients are added up in the same
    order.
    """
    return _SlotBySlot(orders, placement).run()


class _SlotBySlot:
    def __init__(self, orders: list[Order], placement: Placement) -> None:
        self.stages = placement.stages
        self.num_stages = placement.num_stages
        self.todo = [list(reversed(order)) for order in orders]  # next operation last
        self.done: set[tuple[str, int, int]] = set()  # FORWARD or BACKWARD, stage, microbatch
        self.result: list[Order] = [[] for _ in orders]

    def run(self) -> list[Order]:
        while any(self.todo):
            chosen = {rank: self._choose(rank) for rank in range(len(self.todo))}
            ran = [(rank, self.todo[rank].pop(at)) for rank, at in chosen.items() if at is not None]
            if not ran:  # the circle is not of this kind: hand on what is left; the clock names what is wrong
                return [done + todo[::-1] for done, todo in zip(self.result, self.todo, strict=True)]
            for rank, at in ran:
                self.result[rank].append(at)
                self.done.add((RESULT_OF[at.op], self.stages[rank][at.chunk], at.mb))
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
        needed = inputs_of(at.op, self.stages[rank][at.chunk], self.num_stages)
        return all((kind, stage, at.mb) in self.done for kind, stage in needed)

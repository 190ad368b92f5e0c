"""Orders that ranks choose while they run: a free rank takes the first operation, by its rules, whose inputs exist."""

from collections.abc import Mapping

from megatron_pp.plan.ir.agenda import Agenda
from megatron_pp.plan.ir.dataflow import RESULT_OF, Result
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders.family import Order


class FreeRanks:
    """Runs all ranks in nominal time. A subclass has ``choose(rank, now)``: the operation that a free rank runs, or
    None if it is idle.

    ``times``: op -> its time. ``collective``: the time of a collective. ``orders``: the operations that each rank has
    run so far. ``ends``: (result, stage, microbatch, part) -> when the result exists.
    """

    def __init__(self, placement: Placement, times: Mapping[str, int], collective: int = 0) -> None:
        self.placement = placement
        self.times = times
        self.collective = collective
        self.orders: list[Order] = [[] for _ in range(placement.pipeline_size)]
        self.ends: dict[tuple[str, int, int, int], int] = {}
        self._free = [0] * placement.pipeline_size
        self._agenda = Agenda([0])  # the times at which a new result may exist
        self._planned = {0}

    def choose(self, rank: int, now: int) -> Instruction | None:
        raise NotImplementedError

    def run(self) -> list[Order]:
        self._agenda.run(self._ask)
        return self.orders

    def _ask(self, now: int, _: float) -> None:
        stages = self.placement.stages
        for rank, free in enumerate(self._free):
            at = self.choose(rank, now) if free <= now else None
            if at is None:
                continue
            op, _stage, mb, _peer, chunk, part, _tensor, _members = at
            self.orders[rank].append(at)
            self._free[rank] = end = now + self.times[op]
            self.ends[RESULT_OF.get(op, op), stages[rank][chunk], mb, part] = end
            self._plan(end)
            self._plan(end + self.collective)

    def _plan(self, when: int) -> None:
        if when not in self._planned:
            self._planned.add(when)
            self._agenda.plan(when, when)

    def are_there(self, results: tuple[Result, ...], mb: int, part: int, now: int) -> bool:
        for op, stage in results:
            there = self.ends.get((op, stage, mb, part))
            if there is None or there > now:
                return False
        return True

"""A rank's copy engines on the clock: one for each direction between device and host, which makes a copy at a time."""

from __future__ import annotations

from megatron_pp.plan.costs import StageCosts
from megatron_pp.plan.instruction import COPY_OF, Instruction
from megatron_pp.plan.sim.simulation import Event


class CopyEngines:
    """Copies of one rank, in the order in which they are posted."""

    def __init__(self, costs: StageCosts, shares: tuple[float, ...]) -> None:
        self.made: list[Event] = []
        self._costs = costs
        self._shares = shares  # of each slice
        self._posted: dict[tuple[str, int, int, int], Event] = {}
        self._free_at: dict[str, float] = {}  # by op

    def post(self, at: Instruction, now: float) -> Event:
        """The copy of OFFLOAD or LOAD: it begins once those posted before it in its direction are over."""
        start = max(now, self._free_at.get(at.op, now))
        copy = Event(at, start, start + self._costs.of(at.op, at.stage) * self._shares[at.slice])
        self._free_at[at.op] = copy.end
        self._posted[(at.op, at.stage, at.mb, at.slice)] = copy
        self.made.append(copy)
        return copy

    def end_of(self, at: Instruction) -> float:
        """When the copy is over that FREE_OFFLOAD or WAIT_LOAD waits for."""
        return self._posted.pop((COPY_OF[at.op], at.stage, at.mb, at.slice)).end

    @property
    def idle_from(self) -> float:
        """When all that was posted is over."""
        return max(self._free_at.values(), default=0.0)

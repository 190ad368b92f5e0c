"""Times in the simulator of copies between device and host."""

from collections.abc import Iterator
from typing import Any

from megatron_pp.plan.costs.cost_hooks import CostHooks
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.simulate.charges import Charges, SimulatedRank
from megatron_pp.plan.simulate.simulation import Event


class _CopyEngines:
    """The copy engines of a rank, one for each direction between device and host. Each makes one copy at a time, in the
    order posted."""

    def __init__(self) -> None:
        self._posted: dict[tuple[str, int, int, int], Event] = {}
        self._free_at: dict[str, float] = {}  # by op

    def post(self, at: Instruction, now: float, time: float) -> Event:
        """Post the copy of ``at``. It begins when all copies that were posted before it in its direction are over."""
        start = max(now, self._free_at.get(at.op, now))
        copy = Event(at, start, start + time)
        self._free_at[at.op] = copy.end
        self._posted[(at.op, at.stage, at.mb, at.part)] = copy
        return copy

    def end_of(self, at: Instruction) -> float:
        """The time at which the copy that ``at`` waits for is over."""
        return self._posted.pop((ins.COPY_OF[at.op], at.stage, at.mb, at.part)).end


class _Copies(Charges):
    """The copies of offloaded activations. A copy in one direction takes the stage's cost ``offload``. With one
    hardware queue the rank that posts a copy waits until the copy begins.
    """

    def prepare(self) -> None:
        self.engines = [_CopyEngines() for _ in self.run.ranks]

    def reached(self, rank: SimulatedRank, at: Instruction) -> Iterator[float]:
        now = self.run.now
        engines = self.engines[rank.number]
        if at.op in ins.COPY_POST_OPS:
            copy = engines.post(at, now, self.run.costs.of(at.op, at.stage) * self.run.shares[at.part])
            rank.run_beside(copy)
            until = copy.start if self.run.one_queue else now
            rank.waits.queued += until - now
        else:
            until = max(now, engines.end_of(at))
            rank.waits.copy += until - now
        if until > now:
            yield until


COSTS = CostHooks[Any]()  # times per stage alone
CHARGES = _Copies

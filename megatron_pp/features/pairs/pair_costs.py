"""How long a pair takes in the simulator, and when its output and its input gradient are sent."""

from collections.abc import Iterator
from operator import itemgetter

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.cost_hooks import CostHooks
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction, operations
from megatron_pp.plan.simulate.charges import Charges, SimulatedRank
from megatron_pp.plan.verify.queues import Entry


class _Costs(CostHooks[StageCosts]):
    """``pair_sends``: the shares of a pair's time after which its output and its input gradient are ready, if they are
    sent within the pair. With (1, 1) both are ready at its end.
    """

    def check(self, costs: StageCosts) -> None:
        if len(costs.pair_sends) != 2 or not all(0 <= share <= 1 for share in costs.pair_sends):
            raise PlanError(f"pair_sends is {costs.pair_sends!r}; it must be two shares of a pair's time, from 0 to 1")

    def sends(self, costs: StageCosts) -> tuple[float, float]:
        return costs.pair_sends


COSTS = _Costs()


class _Pairs(Charges):
    """A pair takes the time of both halves together. A send within the pair goes out after its share of that time
    (``pair_sends``)."""

    def joined(self, rank: SimulatedRank, at: Instruction) -> Iterator[Entry | float]:
        run = self.run
        whole = sum(map(run.time_of, operations(at)))
        begun = now = run.now
        sends: list[tuple[float, int, Instruction]] = []  # when each goes out, and its index in the rank's times
        backward = 0  # its index
        for one in at.members:
            if one.op in ins.SEND_OPS:
                due = begun + run.costs.joined_sends[one.op == ins.SEND_B] * whole
                sends.append((due, len(rank.starts), one))
                rank.note(now, now)
                continue
            took = run.time_of(one)
            backward = len(rank.starts)
            rank.note(now, now + took)
            now += took
        rank.busy += whole
        delay = 0.0
        for due, index, one in sorted(sends, key=itemgetter(0)):
            if due + delay > run.now:
                yield due + delay
            rank.starts[index] = rank.ends[index] = since = run.now
            held = run.in_front_of(run.post(rank, one))
            if held is not None:
                yield held
                delay += run.now - since
                rank.ends[backward] += run.now - since
                rank.waits.queued += run.now - since
        if begun + whole + delay > run.now:
            yield begun + whole + delay


CHARGES = _Pairs

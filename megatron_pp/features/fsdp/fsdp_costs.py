"""Times in the simulator of the collectives of a rank and its data-parallel replicas."""

from typing import Any

from megatron_pp.plan.costs.cost_hooks import CostHooks
from megatron_pp.plan.simulate.charges import Charges
from megatron_pp.plan.simulate.simulation import Event, Transfer
from megatron_pp.plan.verify.queues import Gathering


class _Collectives(Charges):
    """The collectives of sharded stages. The all-gather of a stage's parameters takes the stage's cost ``unshard``, and
    the reduce-scatter of its gradients the cost ``reduce_grad``. They use a link of their own.
    """

    def transfer(self, ends: Gathering, now: float) -> Transfer:
        at = ends[0].at
        rank = ends[0].entry.rank
        since = ends[0].entry.posted
        end = now + self.run.costs.of(at.op, at.stage)
        return Transfer(rank, rank, at.op, at.stage, at.mb, 0.0, since, since, now, now, end)

    def began(self, ends: Gathering, transfer: Transfer) -> None:
        self.run.ranks[transfer.source].beside.append(Event(ends[0].at, transfer.start, transfer.end))


COSTS = CostHooks[Any]()  # times per stage alone
CHARGES = _Collectives

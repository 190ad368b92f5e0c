"""The time that each slice of a sequence takes, as a share of the times in a plan's costs."""

from megatron_pp.features.slices.slice_costs import check_share, slice_shares
from megatron_pp.plan.costs.cost_hooks import CostHooks
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.simulate.charges import Charges


class _Costs(CostHooks[StageCosts]):
    """``attention``: the share of causal attention in the time of a whole sequence, which is cut into slices of equal
    length; at 0 all slices cost the same.
    """

    def check(self, costs: StageCosts) -> None:
        check_share(costs.attention)

    def parts(self, costs: StageCosts, parts: int) -> tuple[float, ...]:
        return slice_shares((1,) * parts, costs.attention)


COSTS = _Costs()
CHARGES = Charges  # slices have no instructions of their own

"""Costs of an output layer, whole or split over all ranks, and times of its collectives in the simulator."""

import math
from collections.abc import Mapping
from dataclasses import replace

from megatron_pp.errors import PlanError
from megatron_pp.features.output_layer.output_instructions import OUTPUT_S, OUTPUT_T, moved_by
from megatron_pp.plan.costs.cost_hooks import CostHooks
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.instruction import NONE
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.simulate.charges import Charges
from megatron_pp.plan.simulate.simulation import Transfer
from megatron_pp.plan.verify.queues import Gathering

_NONE = (0.0, 0.0, 0.0)


class _Costs(CostHooks[StageCosts]):
    """``output_layer``: forward, input gradient and weight gradient of the whole layer with its loss, where the stages'
    times are without it. ``passes``: S and T of each rank, from ``output_layer`` or measured.
    """

    def check(self, costs: StageCosts) -> None:
        if not all(math.isfinite(time) and time >= 0 for time in (*costs.output_layer, *costs.passes)):
            raise PlanError(
                f"an output layer's times are {costs.output_layer}, {costs.passes}; they must be at least 0"
            )

    def placed(self, costs: StageCosts, placement: Placement) -> StageCosts:
        """The layer's times are added to the last stage's, or are those of S and T. With one barrier S has the forward
        and the input gradient and T the weight gradient; with two S has the forward.
        """
        forward, backward_input, weight = costs.output_layer
        if costs.output_layer == _NONE:
            return costs
        if not placement.barriers:
            whole = replace(costs, output_layer=_NONE)
            return whole.with_last(forward, backward_input + weight, backward_input, weight)
        early = backward_input if placement.barriers == 1 else 0.0
        s = forward + early
        t = backward_input - early + weight
        size = placement.pipeline_size
        return replace(costs, output_layer=_NONE, passes=(s / size, t / size))

    def times(self, costs: StageCosts) -> Mapping[str, float]:
        return dict(zip((OUTPUT_S, OUTPUT_T), costs.passes, strict=False))


COSTS = _Costs()


class _Collectives(Charges):
    """The collectives of the layer. They use no link of their own, and start when all ranks have posted them."""

    def transfer(self, ends: Gathering, now: float) -> Transfer:
        op = ends[0].at.op
        placement = self.run.plan.placement
        moved = moved_by(op, placement.barriers)
        taken = self.run.network.collective_time(moved, placement.pipeline_size)
        posted = sorted(end.entry.posted for end in ends)
        root = placement.homes[-1][0]
        return Transfer(root, root, op, NONE, ends[0].at.mb, 0.0, posted[0], posted[-1], now, now, now + taken)


CHARGES = _Collectives

"""Costs that features add to the costs of a plan, and the hooks that know their meaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from megatron_pp.feature_table import FEATURES
from megatron_pp.on_demand import load
from megatron_pp.plan.ir.feature import AddedSettings, Settings
from megatron_pp.plan.ir.placement import Placement

Costs = TypeVar("Costs")  # StageCosts, which look up here what features add

STAGE_TIMES = {name: ops for row in FEATURES for name, ops in row.stage_times.items()}
"""Every time per stage that is a feature's -> the instructions that take it."""
COST_DEFAULTS = {
    **dict.fromkeys(STAGE_TIMES, ()),
    **{name: default for row in FEATURES for name, default in row.other_costs.items()},
}
"""Every cost that is a feature's."""
MEASURED_DEFAULTS = {name: None for row in FEATURES for name in row.measured}
"""Costs of features that a run can measure, with their default."""


class CostSettings(AddedSettings):
    """The costs of features in a plan's costs. Times per stage that are not given are 0 for each stage."""

    DEFAULTS = COST_DEFAULTS
    forward: tuple[float, ...]

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return (0.0,) * len(self.forward) if name in STAGE_TIMES and not value else value


class MeasuredSettings(AddedSettings):
    """The costs of features among the measured values."""

    DEFAULTS = MEASURED_DEFAULTS


class CostHooks(Generic[Costs]):
    """The meaning of a feature's costs. It holds no state; by default the costs have no effect."""

    def check(self, costs: Costs) -> None:
        """Raises PlanError for what cannot be."""

    def placed(self, costs: Costs, placement: Placement) -> Costs:
        """The costs of a plan with this placement."""
        return costs

    def times(self, costs: Costs) -> Mapping[str, float]:
        """The times of the feature's compute operations on every stage."""
        return {}

    def parts(self, costs: Costs, parts: int) -> tuple[float, ...] | None:
        """The share of each part of a microbatch in the times; None where all have the same."""
        return None

    def sends(self, costs: Costs) -> tuple[float, float] | None:
        """The shares of joined operations' time after which an activation and a gradient are sent within it."""
        return None


def known_costs(**costs: Any) -> dict[str, Any]:
    """The entries of ``costs`` that belong to a feature of this package."""
    return {name: value for name, value in costs.items() if name in COST_DEFAULTS}


def cost_hooks(added: Settings) -> tuple[CostHooks[Any], ...]:
    """The hooks of the features that have one of these costs."""
    given = dict(added)
    return tuple(
        load(row.costs).COSTS for row in FEATURES if row.costs and not given.keys().isdisjoint(row.other_costs)
    )

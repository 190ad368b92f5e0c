"""The values that plans are made for: measured times, and costs of unequal microbatches. Never imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from megatron_pp.errors import ConfigError, PlanError, ScheduleError
from megatron_pp.plan.costs.measured import Measured, measured_values
from megatron_pp.plan.ir.placement import Placement


def measured_of(config: Any, placement: Placement | None = None) -> Measured | None:
    """The times and memory that the automatic schedules plan for. None if none are given. Raises ScheduleError if they
    cannot be read, or do not fit ``placement``."""
    if config.pipeline_measured is None:
        return None
    try:
        measured = measured_values(config.pipeline_measured)
        if measured is not None and placement is not None:
            measured.costs(placement.num_stages), measured.memory(placement)
    except PlanError as error:
        raise ScheduleError(f"pipeline_measured: {error}") from error
    return measured


def checked_costs(costs: Any, count: int | None = None) -> tuple[float, ...]:
    """The cost of each microbatch. Raises ConfigError unless there are ``count`` costs; None: any number."""
    if not isinstance(costs, Iterable):
        raise ConfigError(f"microbatch_costs is {costs!r}; it must be a list of numbers above 0, or a function")
    found = tuple(costs)
    count = len(found) if count is None else count
    numbers = [cost for cost in found if isinstance(cost, (int, float)) and not isinstance(cost, bool)]
    if len(found) != count or len(numbers) != count or not all(0 < cost < math.inf for cost in numbers):
        raise ConfigError(
            f"microbatch_costs is {list(found)}; it must be {count} finite numbers above 0, one for each microbatch"
        )
    return found


def costs_of_step(given: Any, count: int) -> tuple[float, ...]:
    """The cost of each of the ``count`` microbatches of a step; () if no costs are given. ``given``: the setting, which
    is called if it is a function."""
    costs = given() if callable(given) else given
    return () if costs is None else checked_costs(costs, count)

"""What makes a step's settings impossible. Each check raises with the value and the nearest legal one; ``made.py`` has
those of whole configs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_pp.common.names import did_you_mean
from megatron_pp.errors import ConfigError, PlanError, ScheduleError
from megatron_pp.plan import orders
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import BATCHED, OVERLAP, PLAIN
from megatron_pp.plan.orders.family import Family

if TYPE_CHECKING:
    from megatron_pp.plan.costs.measured import Measured
    from megatron_pp.plan.hooks import PlanHooks


def measured_of(config: Any, placement: Placement | None = None) -> Measured | None:
    """What the automatic schedules plan for. Raises ScheduleError, also where it does not fit ``placement``."""
    if config.pipeline_measured is None:
        return None
    try:
        from megatron_pp.plan.costs.measured import measured_values

        measured = measured_values(config.pipeline_measured)
        if measured is not None and placement is not None:
            measured.costs(placement.num_stages), measured.memory(placement)
    except PlanError as error:
        raise ScheduleError(f"pipeline_measured: {error}") from error
    return measured


def checked_costs(costs: Any, count: int | None = None) -> tuple[float, ...]:
    """What each of ``count`` microbatches costs; None: of any number of them."""
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


def check_timeouts(config: Any) -> None:
    given = config.p2p_timeout, config.compute_timeout
    if None not in given and config.compute_timeout < config.p2p_timeout:
        raise ConfigError(
            f"compute_timeout is {config.compute_timeout!r}, below p2p_timeout, {config.p2p_timeout!r}; it must be "
            "at least as long, or None"
        )


def lowering_policy(config: Any) -> str:
    """The policy of overlap_p2p_comm and batch_p2p_comm. Raises ConfigError where both are set."""
    overlap, batched = config.overlap_p2p_comm, config.batch_p2p_comm
    if overlap and batched:
        raise ConfigError(
            "overlap_p2p_comm and batch_p2p_comm are both True; a grouped call cannot overlap with compute, so set "
            "batch_p2p_comm=False or leave it out"
        )
    return OVERLAP if overlap else BATCHED if batched else PLAIN


def schedule_name(schedule: str | None, num_chunks: int, added: Iterable[PlanHooks]) -> str:
    """``config.pipeline_schedule``, or what the number of chunks and the features ``added`` by the config imply."""
    if schedule:
        return schedule
    named = next((name for hooks in added if (name := hooks.schedule(num_chunks))), "")
    return named or (orders.INTERLEAVED if num_chunks > 1 else orders.ONE_F_ONE_B)


def schedule_family(schedule: str | None, num_chunks: int, added: Iterable[PlanHooks]) -> Family:
    """The family that ``config.pipeline_schedule`` names. Raises ScheduleError for an unknown name, a file that cannot
    be read, or another number of chunks than the family has."""
    name = schedule_name(schedule, num_chunks, added)
    family = known_family(name)
    if family.chunks not in (None, num_chunks):
        fitting = [name for name, other in orders.SCHEDULES.items() if other.chunks in (None, num_chunks)]
        raise ScheduleError(
            f"pipeline_schedule {name!r} needs {family.chunks} model chunk(s) a rank; {num_chunks} were given "
            f"(virtual_pipeline_model_parallel_size). Schedules for {num_chunks}: {', '.join(fitting)}"
        )
    return family


def known_family(name: str) -> Family:
    """The family of this name, or in the file of this name. Raises ScheduleError."""
    try:
        return orders.find_family(name)
    except PlanError as error:
        if orders.names_a_file(name):
            raise ScheduleError(f"pipeline_schedule: {error}") from error
        hint = did_you_mean(name, orders.SCHEDULES)
        raise ScheduleError(f"pipeline_schedule is {name!r}{hint}; it must be {orders.choices()}") from error

"""Checks of a step's settings. They raise with the value and the nearest legal one. ``made.py`` checks a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_pp.config.checks import whole_number
from megatron_pp.errors import ConfigError, PlanError
from megatron_pp.plan import orders
from megatron_pp.plan.ir.spec import BATCHED, OVERLAP, PLAIN
from megatron_pp.plan.orders.family import Family

if TYPE_CHECKING:
    from megatron_pp.plan.hooks import PlanHooks


def check_timeouts(config: Any) -> None:
    given = config.p2p_timeout, config.compute_timeout
    if None not in given and config.compute_timeout < config.p2p_timeout:
        raise ConfigError(
            f"compute_timeout is {config.compute_timeout!r}, below p2p_timeout, {config.p2p_timeout!r}; it must be "
            "at least as long, or None"
        )


def lowering_policy(config: Any) -> str:
    """The policy that overlap_p2p_comm and batch_p2p_comm choose. Raises ConfigError if both are set."""
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
    """The family that ``config.pipeline_schedule`` names. Raises ScheduleError for an unknown name, for a file that
    cannot be read, and for a number of chunks that the family does not have."""
    name = schedule_name(schedule, num_chunks, added)
    family = known_family(name)
    if family.chunks not in (None, num_chunks):
        from megatron_pp.config import refused_schedules

        raise refused_schedules.error_of_chunks(name, family.chunks, num_chunks)
    return family


def known_family(name: str) -> Family:
    """The family of this name, or the one in the file of this name. Raises ScheduleError."""
    try:
        return orders.find_family(name)
    except PlanError as error:
        from megatron_pp.config import refused_schedules

        raise refused_schedules.error_of_name(name, error) from error


def runs_at_full_speed(num_microbatches: int, pipeline_size: int, num_chunks: int, group_size: int) -> bool:
    """Whether the pipeline fills, and no rank idles longer than the schedule's own bubble."""
    if num_microbatches < pipeline_size:
        return pipeline_size == 1
    last = num_microbatches % group_size
    return num_chunks == 1 or last == 0 or last >= pipeline_size


def check_group_size(pipeline_size: int, num_chunks: int, group_size: int | None, small_groups: bool = False) -> int:
    """The group size in use. It is P if ``group_size`` is None.

    A group larger than M has M microbatches. In a group smaller than P, ranks wait for their own output. Megatron
    refuses such a group, and so does this check, except for schedules that save memory by it (``small_groups``).

    Raises ConfigError with the nearest legal value."""
    whole_number("pipeline_model_parallel_size", pipeline_size)
    whole_number("virtual_pipeline_model_parallel_size", num_chunks)
    if group_size is None:
        return pipeline_size
    group_size = whole_number("microbatch_group_size_per_vp_stage", group_size, hint=f"default {pipeline_size}")
    if num_chunks > 1 and group_size < pipeline_size and not small_groups:
        raise ConfigError(
            f"microbatch_group_size_per_vp_stage is {group_size}; with {pipeline_size} pipeline ranks and {num_chunks} "
            f"chunks each the nearest legal value is {pipeline_size}"
        )
    return group_size

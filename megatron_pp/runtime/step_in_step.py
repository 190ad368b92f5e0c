"""The error of a step that is called while another step of its pipeline runs, around it or in another thread."""

from __future__ import annotations

from megatron_pp.errors import ScheduleInputError


def error(rank: int) -> ScheduleInputError:
    """The error for pipeline rank ``rank``."""
    return ScheduleInputError(
        f"pipeline rank {rank}: a step of this pipeline was called while another one is running. Each would receive "
        "messages of the other one. Call the schedule when the running step has returned; for steps at the same time, "
        "make a process group for each of their pipelines"
    )

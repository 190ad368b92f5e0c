"""The errors for an unknown schedule, and for one that does not fit the number of model chunks."""

from megatron_pp.common.names import did_you_mean
from megatron_pp.errors import PlanError, ScheduleError
from megatron_pp.plan import orders


def error_of_chunks(name: str, needed: int | None, given: int) -> ScheduleError:
    """The error for a schedule that needs another number of model chunks than ``given``."""
    fitting = [name for name, family in orders.SCHEDULES.items() if family.chunks in (None, given)]
    return ScheduleError(
        f"pipeline_schedule {name!r} needs {needed} model chunk(s) a rank; {given} were given "
        f"(virtual_pipeline_model_parallel_size). Schedules for {given}: {', '.join(fitting)}"
    )


def error_of_name(name: str, error: PlanError) -> ScheduleError:
    """The error for an unknown schedule ``name``, or for a file that cannot be read, as ``error`` says."""
    if orders.names_a_file(name):
        return ScheduleError(f"pipeline_schedule: {error}")
    hint = did_you_mean(name, orders.SCHEDULES)
    return ScheduleError(f"pipeline_schedule is {name!r}{hint}; it must be {orders.choices()}")

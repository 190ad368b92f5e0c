"""The errors of schedules that are not known, or do not fit the number of model chunks."""

from megatron_pp.common.names import did_you_mean
from megatron_pp.errors import PlanError, ScheduleError
from megatron_pp.plan import orders


def error_of_chunks(name: str, needed: int | None, given: int) -> ScheduleError:
    """The schedule ``name`` needs another number of model chunks."""
    fitting = [name for name, family in orders.SCHEDULES.items() if family.chunks in (None, given)]
    return ScheduleError(
        f"pipeline_schedule {name!r} needs {needed} model chunk(s) a rank; {given} were given "
        f"(virtual_pipeline_model_parallel_size). Schedules for {given}: {', '.join(fitting)}"
    )


def error_of_name(name: str, error: PlanError) -> ScheduleError:
    """There is no schedule ``name``, or its file cannot be read, as ``error`` says."""
    if orders.names_a_file(name):
        return ScheduleError(f"pipeline_schedule: {error}")
    hint = did_you_mean(name, orders.SCHEDULES)
    return ScheduleError(f"pipeline_schedule is {name!r}{hint}; it must be {orders.choices()}")

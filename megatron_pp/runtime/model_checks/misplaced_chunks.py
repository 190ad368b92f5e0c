"""The texts about model chunks that were built for other stages, or that have no number: loaded when one is needed."""

from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.ir.placement import Placement


def error_of(number: int, wrong: str, placement: Placement, rank: int, schedule: str) -> ScheduleInputError:
    """``number``: of the chunk on this rank; ``wrong``: which of its attributes contradicts its stage."""
    numbers = placement.stages[rank]
    return ScheduleInputError(
        f"chunk {number} on rank {rank} is stage {numbers[number]} under {schedule}: build it with stage_numbers; "
        f"{wrong}. {_call(placement, schedule)}[{rank}] is "
        f"{numbers}: the stages of this rank, numbered from 0, in the order of the list of model chunks"
    )


def warning(placement: Placement, schedule: str) -> str:
    """For PipelineStages that do not say which stage they are."""
    return (
        "the order of the model chunks is not checked, and chunks in a wrong order train wrongly: give each its "
        f"number in the model, PipelineStage(module, config, stage=number), from {_call(placement, schedule)}[rank]"
    )


def _call(placement: Placement, schedule: str) -> str:
    return f"megatron_pp.stage_numbers({schedule!r}, {placement.pipeline_size}, {placement.num_chunks})"

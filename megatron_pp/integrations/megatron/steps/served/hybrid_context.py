"""Steps with Megatron-core's hybrid context parallelism."""

from typing import Any

from megatron_pp.errors import ScheduleInputError


def reason_not_served(config: Any) -> str:
    """Why Megatron's own schedule runs such a step. Raises ScheduleInputError in a pipeline, where it does not
    either."""
    if (size := getattr(config, "pipeline_model_parallel_size", 1)) > 1:
        raise ScheduleInputError(
            f"config.hybrid_context_parallel with pipeline_model_parallel_size {size}: Megatron forms such "
            "microbatches in its schedule without pipeline alone, another number on each rank, and its pipelined "
            "schedules ignore the flag; leave it out, and give install() megatron_pp.features.packing.steps."
            "PackedSteps as microbatch_costs, which chooses context sizes by the same rule"
        )
    return "hybrid context parallelism (config.hybrid_context_parallel)"

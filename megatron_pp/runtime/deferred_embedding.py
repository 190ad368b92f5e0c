"""Weight gradients of the embedding that were left for the end of the step (``defer_embedding_wgrad_compute``)."""

from collections.abc import Sequence
from typing import Any

from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.errors import ScheduleInputError


def finish_embedding(chunks: Sequence[Any]) -> None:
    """Calls the function of the last stage's chunk. Raises ScheduleInputError if it has none."""
    for chunk in chunks:
        finish = wrapped_attribute(chunk, "finish_embedding_wgrad_compute")
        if finish is not None:
            finish()
            return
    if any(wrapped_attribute(chunk, "post_process", False) for chunk in chunks):
        raise ScheduleInputError(
            "config.defer_embedding_wgrad_compute is set, but no model chunk of the last stage has "
            "finish_embedding_wgrad_compute(); unset the field"
        )

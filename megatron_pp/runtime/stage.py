"""A plain ``torch.nn.Module`` as a pipeline stage."""

from typing import Any

import torch

from megatron_pp.config.checks import whole_number
from megatron_pp.errors import ScheduleInputError


class PipelineStage(torch.nn.Module):
    """Gives a module what the schedules expect of a model chunk: ``set_input_tensor``, ``config``, ``vp_stage``.

    Call it as ``stage(batch)``. On the first stage the module gets ``batch``, elsewhere the tensor (or the list of
    tensors) that the stage before sent. It gets the named tensors of ``config.skip_tensors`` that the stage uses as
    keyword arguments. A module whose stage makes named tensors returns (output, dict of them).

    ``stage``: the number in the model, from 0, of the stage that ``module`` holds (``megatron_pp.stage_numbers``). If
    the chunk is another stage under the schedule, a step raises ScheduleInputError before any communication. Without
    ``stage`` nothing is compared, and chunks in a wrong order train wrongly; the first step of several such chunks logs
    a warning.
    """

    def __init__(
        self, module: torch.nn.Module, config: Any, vp_stage: int | None = None, *, stage: int | None = None
    ) -> None:
        super().__init__()
        self.inner = module
        self.config = config
        self.vp_stage = vp_stage
        self.stage_in_model = None if stage is None else whole_number("stage", stage, 0, ScheduleInputError)
        self.received: Any = None
        self.named: dict[str, Any] = {}
        self.spent = False  # whether an input was received, used and dropped

    def set_input_tensor(self, tensors: Any) -> None:
        """Take what the previous stage sent: a list with one or several tensors, or [None] on the first stage."""
        # Past nn.Module's __setattr__, which looks for parameters, modules and buffers: microseconds per microbatch.
        state = self.__dict__
        if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            state["received"] = tensors[0]
            return
        if isinstance(tensors, list) and tensors and isinstance(tensors[-1], dict):
            *tensors, state["named"] = tensors
        state["received"] = tensors[0] if isinstance(tensors, list) and len(tensors) == 1 else tensors

    def drop_received(self) -> None:
        """Called when ``forward_step_func`` has returned, which may call the stage several times."""
        state = self.__dict__
        state["spent"] = state["received"] is not None
        state["received"], state["named"] = None, {}

    def forward(self, batch: Any = None) -> Any:
        """Raises ScheduleInputError if a checkpoint around the stage recomputes it, because its input is dropped."""
        state = self.__dict__
        received = state["received"]
        if received is None and state["spent"]:
            if torch._C._current_graph_task_id() != -1:  # autograd runs in this thread
                raise ScheduleInputError(
                    "a stage was called outside of its microbatch, in a backward; checkpoint the layers inside, as in "
                    "PipelineStage(Checkpointed(module), config, stage=number), not the stage"
                )
            state["spent"] = False
        return self.inner(batch if received is None else received, **state["named"])

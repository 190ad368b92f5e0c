"""A plain ``torch.nn.Module`` as a pipeline stage."""

from typing import Any

import torch


class PipelineStage(torch.nn.Module):
    """Gives a module what the schedules expect of a model chunk: ``set_input_tensor``, ``config``, ``vp_stage``.

    Called as ``stage(batch)``: on the first stage the module gets ``batch``, elsewhere the tensor (or, for several,
    the list) that the stage before sent; and as keyword arguments the named tensors of ``config.skip_tensors`` that the
    stage uses. A module whose stage makes some returns (output, dict of them)."""

    def __init__(self, module: torch.nn.Module, config: Any, vp_stage: int | None = None) -> None:
        super().__init__()
        self.inner = module
        self.config, self.vp_stage = config, vp_stage
        self.received: Any = None
        self.named: dict[str, Any] = {}

    def set_input_tensor(self, tensors: Any) -> None:
        """What the previous stage sent: a list with one tensor, several, or [None] on the first stage."""
        # Past nn.Module's __setattr__, which looks for parameters, modules and buffers: microseconds per microbatch.
        state = self.__dict__
        if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            state["received"] = tensors[0]
            return
        if isinstance(tensors, list) and tensors and isinstance(tensors[-1], dict):
            *tensors, state["named"] = tensors
        state["received"] = tensors[0] if isinstance(tensors, list) and len(tensors) == 1 else tensors

    def forward(self, batch: Any = None) -> Any:
        state = self.__dict__
        received, state["received"] = state["received"], None
        named, state["named"] = state["named"], {}
        return self.inner(batch if received is None else received, **named)

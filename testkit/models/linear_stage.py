"""A model chunk of one linear layer, with the interface that Megatron's schedules call. It loads nothing of the
package, so that tests can count the modules that a step loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class LinearStage(torch.nn.Module):
    """A chunk of one linear layer. ``width``: size of its input and output."""

    def __init__(self, config: Any, vp_stage: int, width: int = 8) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)
        self.config = config
        self.vp_stage = vp_stage
        self.model_type = None
        self.input_tensor: Any = None

    def set_input_tensor(self, given: Any) -> None:
        self.input_tensor = given[0] if isinstance(given, list) else given

    def forward(self, data: Any) -> Any:
        return self.layer(data if self.input_tensor is None else self.input_tensor)


def forward_step(data: Iterator[Any], model: Any) -> Any:
    """A ``forward_step_func`` whose loss is the mean of the output."""
    return model(next(data)), lambda output, **more: (output.mean(), {"loss": output.detach().mean()})

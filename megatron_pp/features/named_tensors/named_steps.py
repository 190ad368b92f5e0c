"""Steps of a model whose stages pass several tensors by name to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime.engine.compute import Activation, Names

if TYPE_CHECKING:
    from megatron_pp.runtime.engine.parts import Steps


@dataclass(eq=False)
class NamedSteps:
    """Steps of a model whose stages pass tensors by name, as a dict (Megatron-LM#4265). The engine gets lists of
    the same tensors.

    There is one message for each tensor between two stages, in the order of the names. ``adjust_tensor_shapes_fn``
    gives the names: it returns dicts of name -> shape instead of lists of shapes."""

    steps: Steps
    received: Names  # names of the tensors that this stage receives
    sent: Names
    last: Sequence[bool]  # for each chunk, whether it is the last stage, whose output is not an activation

    def __post_init__(self) -> None:
        self.backward = self.steps.backward
        self.backward_root = self.steps.backward_root

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        """Run the chunk; ``set_input_tensor`` gets a list with one dict. Raises ScheduleInputError for other names."""
        given = input_tensor
        if self.received is not None and input_tensor is not None:
            tensors = input_tensor if isinstance(input_tensor, (list, tuple)) else [input_tensor]
            given = [dict(zip(self.received, tensors, strict=True))]
        output = self.steps.forward(chunk, mb, given)
        if self.sent is None or self.last[chunk]:
            return _single(output) if given is not input_tensor else output
        return self._in_order(_single(output), chunk)

    def _in_order(self, output: Any, chunk: int) -> list[Any]:
        assert self.sent is not None
        if not isinstance(output, Mapping) or set(output) != set(self.sent):
            got = ", ".join(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
            raise ScheduleInputError(
                f"chunk {chunk} gave {got}; adjust_tensor_shapes_fn says that it sends a dict of {', '.join(self.sent)}"
            )
        tensors = [output[name] for name in self.sent]
        return tensors if len(tensors) > 1 else tensors[0]


def _single(output: Any) -> Any:
    """The output of a model, without the list that Megatron's forward_step returns for an input in a list."""
    return output[0] if isinstance(output, list) and len(output) == 1 else output

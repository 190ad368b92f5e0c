"""Stages that give each other several tensors by name, as a dict.

What travels between two stages is then one message per tensor, in the order of the names. The names come, with the
shapes, from ``adjust_tensor_shapes_fn``: it returns dicts of name -> shape instead of lists of shapes
(Megatron-LM#4265 is about models with such outputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_pp.errors import ScheduleInputError
from megatron_pp.runtime.compute import Activation, Steps

Names = tuple[str, ...] | None


def names_of(shapes: Any) -> Names:
    """The names that ``adjust_tensor_shapes_fn`` gave to what travels; None where it gave a list of shapes."""
    return tuple(shapes) if isinstance(shapes, Mapping) else None


def shapes_of(shapes: Any) -> list[Any]:
    """The shapes alone, in the order of the names."""
    return list(shapes.values()) if isinstance(shapes, Mapping) else list(shapes)


class NamedSteps:
    """Steps of a model whose stages take and give dicts; towards the engine the same tensors are lists.

    received   names of what this stage is given, sent: of what it gives
    last       per chunk, whether it is the last stage, whose output is no activation
    """

    def __init__(self, steps: Steps, received: Names, sent: Names, last: Sequence[bool]) -> None:
        self.steps = steps
        self.received = received
        self.sent = sent
        self.last = last

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        """Run the chunk; ``set_input_tensor`` gets a list with one dict. Raises ScheduleInputError for other names."""
        given = input_tensor
        if self.received is not None and input_tensor is not None:
            given = [dict(zip(self.received, _listed(input_tensor), strict=True))]
        output = self.steps.forward(chunk, mb, given)
        if self.sent is None or self.last[chunk]:
            return _single(output) if given is not input_tensor else output
        return self._in_order(_single(output), chunk)

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
        """Backward through the tensors of the dict; gradients in the order of the names."""
        return self.steps.backward(chunk, mb, input_tensor, output, output_grad)

    def backward_root(self, output: Activation) -> Any:
        return self.steps.backward_root(output)

    def _in_order(self, output: Any, chunk: int) -> list[Any]:
        assert self.sent is not None
        if not isinstance(output, Mapping) or set(output) != set(self.sent):
            got = ", ".join(output) if isinstance(output, Mapping) else f"a {type(output).__name__}"
            raise ScheduleInputError(
                f"chunk {chunk} gave {got}; adjust_tensor_shapes_fn says that it sends a dict of {', '.join(self.sent)}"
            )
        tensors = [output[name] for name in self.sent]
        return tensors if len(tensors) > 1 else tensors[0]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _single(output: Any) -> Any:
    """What a model gave for an input in a list: Megatron's forward_step gives a list back for a list."""
    return output[0] if isinstance(output, list) and len(output) == 1 else output

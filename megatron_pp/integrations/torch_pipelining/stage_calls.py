"""How a stage's module is called: with the tensors that travel to it, and what travels on from it.

A stage made by hand gets what the stage before gave, and gives what its module returns. A stage of ``pipeline()`` may
use outputs of earlier stages than the one before it (skip connections): these travel through the stages between, as
further tensors of each hop.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_pp.errors import ScheduleInputError


class Value(NamedTuple):
    """An output of the module of ``stage``, by its place among them."""

    stage: int
    place: int


class StageCall:
    """Calls the module of torch's ``stage``, which is read for each call: programs replace it after the stage is
    made."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.index: int = stage.stage_index
        self.is_first, self.is_last = self.index == 0, self.index == stage.num_stages - 1

    def __call__(self, given: Sequence[Any], kwargs: Mapping[str, Any], module: Any = None) -> Any:
        """``given``: the user's arguments on the first stage, elsewhere the tensors of a hop. Returns what the module
        gives, on the last stage as it is, else as a tuple of tensors. ``module``: in the place of the stage's."""
        output = (self.stage.submod if module is None else module)(*given, **kwargs)
        return output if self.is_last else outputs_of(output)


class TracedCall(StageCall):
    """Calls a stage of ``pipeline()``, which knows the whole model's graph."""

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        used = _used_values(stage.pipe_info.graph)
        if len(used) != stage.num_stages:
            raise ScheduleInputError(
                f"pipeline() made {len(used)} stages, and stage {self.index} says that there are {stage.num_stages}"
            )
        self.uses = used[self.index]
        self.comes, self.goes = _carried(used, self.index - 1), _carried(used, self.index)

    def __call__(self, given: Sequence[Any], kwargs: Mapping[str, Any], module: Any = None) -> Any:
        here: dict[Value, Any] = {}
        if not self.is_first:
            here = dict(zip(self.comes, given, strict=True))
            given = [here[value] for value in self.uses]
        output = (self.stage.submod if module is None else module)(*given, **kwargs)
        if self.is_last:
            return output
        here |= {Value(self.index, k): tensor for k, tensor in enumerate(outputs_of(output))}
        return tuple(here[value] for value in self.goes)


def stage_call(stage: Any) -> StageCall:
    return TracedCall(stage) if hasattr(stage, "pipe_info") else StageCall(stage)


def outputs_of(output: Any) -> tuple[Any, ...]:
    """torch's rule: what is no tuple or list is the only output."""
    return tuple(output) if type(output) in (tuple, list) else (output,)


def _used_values(graph: Any) -> list[list[Value]]:
    """Per stage, in the order of its arguments: the outputs of earlier stages that it uses."""
    nodes = [node for node in graph.nodes if node.op == "call_module"]
    number = {node: stage for stage, node in enumerate(nodes)}
    used = []
    for node in nodes:
        values = (_value(argument, number) for argument in node.args)
        used.append([value for value in values if value is not None])
    return used


def _value(argument: Any, number: Mapping[Any, int]) -> Value | None:
    """The output that an argument is; None for an input of the whole model."""
    place = 0
    while getattr(argument, "target", None) is operator.getitem:
        argument, place = argument.args
    return Value(number[argument], place) if argument in number else None


def _carried(used: Sequence[Sequence[Value]], stage: int) -> list[Value]:
    """What goes from ``stage`` to the next one: all outputs up to here that later stages use."""
    later = {value for values in used[stage + 1 :] for value in values}
    return sorted(value for value in later if value.stage <= stage)

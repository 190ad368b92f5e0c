"""Calls a stage's module with the tensors that were sent to the stage, and returns those that it sends on.

A stage made by hand gets the outputs of the stage before it, and sends what its module returns. A stage of
``pipeline()`` may use outputs of earlier stages (skip connections). Stages in between pass these on as
further tensors of each hop.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_pp.errors import ScheduleInputError


class Value(NamedTuple):
    """An output of the module of ``stage``, by its place among the module's outputs."""

    stage: int
    place: int


class StageCall:
    """Calls the module of torch's ``stage``. The attribute is read in each call, because programs replace the module
    after the stage is made."""

    def __init__(self, stage: Any) -> None:
        self.stage = stage
        self.index: int = stage.stage_index
        self.is_first = self.index == 0
        self.is_last = self.index == stage.num_stages - 1

    def __call__(self, given: Sequence[Any], kwargs: Mapping[str, Any], module: Any = None) -> Any:
        """``given``: the user's arguments on the first stage, on others the tensors of a hop. Returns the module's
        output, on the last stage as it is, on others as a tuple of tensors. ``module``: replaces the stage's."""
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
    """The outputs as a tuple. torch's rule: a value that is not a tuple or list is the only output."""
    return tuple(output) if type(output) in (tuple, list) else (output,)


def _used_values(graph: Any) -> list[list[Value]]:
    """For each stage, the outputs of earlier stages that it uses, in the order of its arguments."""
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
    """The values that ``stage`` sends to the next stage: all outputs up to here that later stages use."""
    later = {value for values in used[stage + 1 :] for value in values}
    return sorted(value for value in later if value.stage <= stage)

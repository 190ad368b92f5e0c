"""Runs the backwards of converted chunks (``megatron_pp.weight_grad``) in halves: the store keeps what weight gradients
need, and an instruction of their own computes them later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import MbPart, Task
from megatron_pp.runtime.engine.compute import Activation
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor

if TYPE_CHECKING:
    from megatron_pp.weight_grad.store import WeightGradStore


class SplitBackwards:
    """The part of the engine for ``store``, innermost of all features. The store itself raises for gradients that are
    left at the end."""

    tables: Mapping[str, Mapping[Any, Any]] = {}

    def __init__(self, store: WeightGradStore) -> None:
        self.store = store

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        calls = engine.calls
        calls.around = self.store.step(_completing(engine))
        calls.backward = partial(self._backward, calls.backward)
        handlers[ins.WEIGHT_GRAD] = partial(self._weight_grad, handlers[ins.WEIGHT_GRAD])

    def _backward(
        self, call: Callable[..., Activation], at: Task, given: Activation, output: Any, output_grad: Activation
    ) -> Activation:
        with self.store.backward(at.chunk, at.mb_part, split=at.op == ins.INPUT_GRAD):
            return call(at, given, output, output_grad)

    def _weight_grad(self, handler: Handler, at: Task) -> None:
        self.store.run(at.chunk, at.mb_part)
        handler(at)


def _completing(engine: PlanExecutor) -> dict[int, MbPart]:
    """Chunk -> the microbatch, or its part, that completes the gradients of the chunk."""
    tasks = engine.plan.tasks(engine.rank)  # no pair is the last: the backward of its forward follows
    return {at.chunk: at.mb_part for at in tasks if at.op in ins.BACKWARD_OPS or at.op == ins.WEIGHT_GRAD}

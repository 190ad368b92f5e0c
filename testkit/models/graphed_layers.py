"""Layers that return their input gradient in a static buffer, as Transformer Engine's CUDA graphs do.

With ``_reuse_graph_input_output_buffers`` (on under Megatron from TE 2.7) other graphs may use a graphed chunk's static
input gradient as soon as the next chunk's backward is over, and autograd returns that buffer itself. Here the backward
after the next one fills the buffer with NaN, in place of another graph's results.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.toy import ToyBlock


class StaticGradients:
    """The static buffers of one rank's graphs. Only the buffers of the last two backwards still have their
    gradients."""

    def __init__(self) -> None:
        self._buffers: deque[torch.Tensor] = deque()

    def put(self, grad: torch.Tensor) -> torch.Tensor:
        """``grad``, copied into the static buffer of the running graph."""
        if len(self._buffers) == 2:
            self._buffers.popleft().data.fill_(float("nan"))  # autograd does not count a graph's writes
        self._buffers.append(grad.clone())
        return self._buffers[-1].detach()


class InStaticBuffer(torch.autograd.Function):
    """The identity. Its backward puts the gradient into a static buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradients: StaticGradients) -> torch.Tensor:
        ctx.gradients = gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.gradients.put(grad), None


class GraphedBlock(ToyBlock):
    """A stage of the toy model whose input gradient is in a static buffer of its rank."""

    gradients: StaticGradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(InStaticBuffer.apply(x, self.gradients))


def share_static_gradients(chunks: list[Any]) -> None:
    """Let the graphs of one rank use its buffers in turn."""
    gradients = StaticGradients()
    for chunk in chunks:
        chunk.inner.gradients = gradients


class SettlesGradients(PlanExecutor):
    """An engine that waits for the send of every input gradient before the operation after the next backward."""

    def _backward(self, at: Task) -> None:
        pending = [handle for (op, *_), handle in self.handles.items() if op == ins.SEND_B]
        pending += [handle for handle, free in self.deferred if free.op == ins.FREE_B]
        super()._backward(at)
        for handle in pending:
            handle.wait()

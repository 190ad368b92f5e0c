"""Layers in CUDA graphs that share one pool, as Megatron captures them itself (``cuda_graph_impl="local"``).

As in ``megatron/core/transformer/cuda_graphs.py``, each microbatch has its own graphs in each layer. The first training
step records the order in which it runs them. At its end they are captured in this order, and memory that a graph no
longer needs goes to graphs that are captured later. Later steps replay the graphs in turn. Values are computed outside
of the graphs; only the device's records have the graphs' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_pp.comm.p2p_communicator import P2PCommunicator
from megatron_pp.testing.pipeline import placement_of, toy_step
from megatron_pp.testing.toy import (
    ToyBlock,
    ToyData,
    ToyResult,
    gradients_of,
    merged,
    reference_run,
    toy_chunks,
    toy_config,
)
from testkit.streams import StreamReport, check_streams
from testkit.streams.device import unrecorded
from testkit.streams.torch_calls.capture import give_back


class LocalGraphs:
    """The graphs of one rank."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.captures: list[Callable[[], None]] = []
        self.are_captured = False

    def capture(self) -> None:
        """Capture the graphs, at the end of a schedule."""
        if self.captures:
            self.are_captured = True
        for capture in self.captures:
            capture()
        self.captures.clear()


class _Runner:
    """The graphs of one layer for one microbatch."""

    def __init__(self, layer: ToyBlock, graphs: LocalGraphs, x: torch.Tensor) -> None:
        self.layer = layer
        self.graphs = graphs
        self.needs_grad = x.requires_grad
        self.shape = x.shape
        self.parameters = list(layer.parameters())
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()

    def _inputs(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [*([x] if self.needs_grad else []), *self.parameters]

    def capture_forward(self) -> None:
        self.forward_graph.capture_begin(self.graphs.pool, "thread_local")
        self.x = torch.empty(self.shape).requires_grad_(self.needs_grad)
        self.captured = self.layer.run(self.x)
        self.output = self.captured.detach()
        self.forward_graph.capture_end()

    def capture_backward(self) -> None:
        self.backward_graph.capture_begin(self.graphs.pool, "thread_local")
        self.output_grad = torch.empty(self.shape)
        self.grads = torch.autograd.grad(self.captured, self._inputs(self.x), self.output_grad)
        self.backward_graph.capture_end()
        del self.captured
        for static in (self.x, self.output, self.output_grad, *self.grads):
            give_back(static)

    def replay_forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x.data.copy_(x)
        self.forward_graph.replay()
        with unrecorded(), torch.set_grad_enabled(True):
            self.given = x.detach().clone().requires_grad_(self.needs_grad)
            self.made = self.layer.run(self.given)
            self.output.data.copy_(self.made.detach())
        return self.output

    def replay_backward(self, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Replay the backward. The input's gradient is in the graph's memory, the parameters' gradients are not."""
        self.output_grad.data.copy_(grad)
        self.backward_graph.replay()
        with unrecorded():
            made = torch.autograd.grad(self.made, self._inputs(self.given), grad)
            for static, one in zip(self.grads, made, strict=True):
                static.data.copy_(one)
        first, rest = (self.grads[:1], self.grads[1:]) if self.needs_grad else ((None,), self.grads)
        return *first, *(grad.clone() for grad in rest)


class _Noted(torch.autograd.Function):
    """The identity. Its backward records that the graph of the backward is captured next."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, runner: _Runner) -> torch.Tensor:
        ctx.runner = runner
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.runner.graphs.captures.append(ctx.runner.capture_backward)
        return grad, None


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: _Runner, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.runner = runner
        return runner.replay_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return None, *ctx.runner.replay_backward(grad)


class LocalGraphBlock(ToyBlock):
    """A stage whose layers run in graphs."""

    graphs: LocalGraphs

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.runners: list[_Runner] = []

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.graphs.are_captured:
            runner = self.runners.pop(0)
            self.runners.append(runner)
            return _Replayed.apply(runner, x, *runner.parameters)
        if not torch.is_grad_enabled():
            return self.run(x)
        runner = _Runner(self, self.graphs, x)
        self.runners.append(runner)
        self.graphs.captures.append(runner.capture_forward)
        return _Noted.apply(self.run(x), runner)


Step = tuple[ToyData, bool, dict[str, Any]]
"""A step: its data, whether it is forward-only, and fields of its config."""


def steps_with_graphs(size: int, num_chunks: int, steps: Sequence[Step], **fields: Any) -> tuple[StreamReport, float]:
    """Run steps of one model. Its graphs are captured at the end of the first training step. Returns the report, and
    the largest difference between a loss or gradient and that of one process. ``fields``: fields of the config."""
    chunked = num_chunks if num_chunks > 1 else None
    fields = {"virtual_pipeline_model_parallel_size": chunked, **fields}

    def rank_main(communicator: P2PCommunicator) -> list[ToyResult]:
        config = toy_config(**fields)
        rank = communicator.rank
        placement = placement_of(config, size, num_chunks)
        chunks = toy_chunks(placement, rank, config, LocalGraphBlock)
        graphs = LocalGraphs()
        results = []
        for chunk in chunks:
            chunk.inner.graphs = graphs
        for data, forward_only, changed in steps:
            vars(config).update(changed)
            reports = toy_step(chunks, data, communicator, forward_only=forward_only)
            stages = dict(zip(placement.stages[rank], chunks, strict=True))
            results.append(ToyResult([float(r["loss"]) for r in reports], gradients_of(stages)))
            for chunk in chunks:
                chunk.zero_grad()
            graphs.capture()
        return results

    report = check_streams(rank_main, size, toy_config(**fields))
    results = [merged(of_step) for of_step in zip(*report.results, strict=True)]
    references = [reference_run(size * num_chunks, data, forward_only) for data, forward_only, _ in steps]
    return report, max(one.difference(other) for one, other in zip(results, references, strict=True))

"""Runs the plan of a pipeline of several modules. Forwards and backwards get a dict with a tensor of each module that
sends to this chunk; messages are parts of these tensors.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_pp.comm.communicator import Receive, Send
from megatron_pp.comm.transport import ACT, GRAD
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.modules.graph import Edge, ModuleGraph
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import KIND_OF
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.compute import in_one_block
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor

_Cell = tuple[int, int]  # chunk, microbatch
_CHANNEL = {FORWARD: ACT, BACKWARD: GRAD}


class Parts(Protocol):
    """Cuts a tensor that crosses a bridge into parts, and joins them."""

    def cut(self, edge: Edge, tensor: Tensor, count: int) -> Sequence[Tensor]:
        """``tensor`` in ``count`` contiguous parts."""

    def joined(self, edge: Edge, parts: Sequence[Tensor]) -> Tensor:
        """The tensor that is made of these parts. Nothing else holds the parts."""

    def cut_gradient(self, edge: Edge, grad: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        """The contiguous gradients of parts of these shapes, cut from the gradient of the tensor that ``joined``
        made."""


class BatchParts:
    """Cuts along the batch dimension into parts whose sizes differ by at most one. ``dimensions``: that of each
    module."""

    def __init__(self, dimensions: Mapping[str, int]) -> None:
        self.dimensions = dimensions

    def cut(self, edge: Edge, tensor: Tensor, count: int) -> Sequence[Tensor]:
        parts = tensor.tensor_split(count, dim=self.dimensions[edge.module])
        return [part.contiguous() for part in parts]

    def joined(self, edge: Edge, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts), dim=self.dimensions[edge.module])

    def cut_gradient(self, edge: Edge, grad: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
        return cut_along(self.dimensions[edge.module], grad, shapes)


def cut_along(dim: int, grad: Tensor, shapes: Sequence[torch.Size]) -> Sequence[Tensor]:
    """``grad`` in contiguous parts with the sizes in ``dim`` of tensors of these shapes."""
    return [part.contiguous() for part in grad.split([shape[dim] for shape in shapes], dim=dim)]


class ModulesRunner:
    """Runs the modules of one rank. ``graphs``: whether stages build autograd graphs. ``parts``: cuts tensors at
    bridges.
    """

    def __init__(self, plan: Plan, rank: int, parts: Parts, graphs: bool) -> None:
        graph: ModuleGraph = plan.placement.graph  # type: ignore[attr-defined]
        self.edges = {kind: graph.edges[kind][rank] for kind in (FORWARD, BACKWARD)}  # kind -> for each chunk its edges
        self.chunk_of = {edge.name: k for k, edges in enumerate(self.edges[FORWARD]) for edge in edges.sent}
        self.parts = parts
        self.graphs = graphs
        self.trains = not plan.spec.forward_only
        self.arrived: dict[tuple[str, int], Tensor] = {}  # (message, microbatch) -> tensor
        self.leaving: dict[tuple[str, int], Tensor] = {}
        self.inputs: dict[_Cell, dict[str, Tensor]] = {}  # (chunk, microbatch) -> module -> tensor
        self.outputs: dict[_Cell, Any] = {}
        self.joined: dict[_Cell, dict[str, list[torch.Size]]] = {}  # cell -> module -> shapes of its tensor's parts
        self.unsent: defaultdict[_Cell, int] = defaultdict(int)  # messages of an output that are not released
        self.tables: Mapping[str, Mapping[Any, Any]] = {
            "received parts": self.arrived,
            "parts to send": self.leaving,
            "inputs of modules": self.inputs,
            "outputs of modules": self.outputs,
            "shapes of joined parts": self.joined,
            "counts of unsent messages": self.unsent,
        }

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        self.engine = weakref.proxy(engine)
        handlers[FORWARD], handlers[BACKWARD] = self._forward, self._backward
        handlers |= dict.fromkeys(ins.RECV_OPS | ins.SEND_OPS, self._post)
        handlers |= dict.fromkeys(ins.WAIT_OPS, self._wait)
        engine.calls.named_request = self._request
        engine.calls.named_release = self._released

    def _request(self, at: Task) -> Send | Receive:
        channel = _CHANNEL[KIND_OF[at.op]]
        if at.op in ins.SEND_OPS:
            return Send(self.leaving[(at.tensor, at.mb)], at.peer, channel)
        return Receive(None, at.peer, channel, False)

    def _post(self, at: Task) -> None:
        self.engine.post(at, self._request(at))

    def _wait(self, at: Task) -> None:
        handle = self.engine.handles.pop(at.message)
        handle.wait()
        self.arrived[(at.tensor, at.mb)] = handle.tensor

    def _forward(self, at: Task) -> None:
        cell = at.chunk, at.mb
        given, joined = self._collected(FORWARD, cell)
        for tensor in given.values():
            tensor.requires_grad_(self.graphs)
        output = self.engine.calls.forward(at, given)
        sends = self._part_out(
            self.edges[FORWARD][at.chunk].sent, at.mb, lambda edge: self._output_of(edge, output), {}
        )
        if sends:
            self.unsent[cell] = sends
        if self.trains:
            self.inputs[cell], self.outputs[cell] = given, output
            if joined:
                self.joined[cell] = joined
            if not sends and isinstance(output, Mapping):  # the leader of its group sends, or another chunk has it
                self._drop(cell)

    def _output_of(self, edge: Edge, output: Any) -> Tensor:
        found = output.get(edge.module) if isinstance(output, Mapping) else None
        if not isinstance(found, Tensor):
            gave = f"a dict of {', '.join(map(str, output))}" if isinstance(output, Mapping) else type(output).__name__
            raise ScheduleInputError(
                f"forward_step_func gave {gave}; on this rank it must give a dict with the output of module "
                f"{edge.module}, a tensor, which goes to {edge.bridge or 'its next stage'}"
            )
        return found

    def _backward(self, at: Task) -> None:
        cell = (at.chunk, at.mb)
        engine = self.engine
        for handle, sent in engine.deferred:
            if sent.mb == at.mb and sent.op == ins.FREE_F:  # a backward may write to tensors that the forward saved
                handle.check()
        given = self.inputs.pop(cell)
        output = self.outputs.pop(cell)
        joined = self.joined.pop(cell, {})
        grads = engine.calls.backward(at, given, output, self._collected(BACKWARD, cell)[0])

        def grad_of(edge: Edge) -> Tensor:
            grad: Tensor | None = grads[edge.module]
            return torch.zeros_like(given[edge.module]) if grad is None else grad

        self._part_out(self.edges[BACKWARD][at.chunk].sent, at.mb, grad_of, joined)
        engine.close_sync()

    def _collected(self, kind: str, cell: _Cell) -> tuple[dict[str, Tensor], dict[str, list[torch.Size]]]:
        """Module -> its output, or the gradient of its output, made of the received parts; and module -> the shapes of
        these if there are several. Gradients that come over several bridges are summed."""
        found: dict[str, Tensor] = {}
        joined: dict[str, list[torch.Size]] = {}
        parts: list[Tensor] = []
        for edge in self.edges[kind][cell[0]].received:
            parts.append(self.arrived.pop((edge.name, cell[1])))
            if len(parts) < edge.place[1]:
                continue
            whole = parts[0] if len(parts) == 1 else self.parts.joined(edge, parts)
            if len(parts) > 1:
                joined[edge.module] = [part.shape for part in parts]
            found[edge.module] = found[edge.module] + whole if edge.module in found else whole
            parts = []
        return found, joined

    def _part_out(
        self,
        edges: Sequence[Edge],
        mb: int,
        tensor_of: Callable[[Edge], Tensor],
        joined: Mapping[str, Sequence[torch.Size]],
    ) -> int:
        """Cut tensors and put the parts where the sends, or the rank's other chunk, take them. Ranks of one group get
        the same parts. A gradient is cut as its tensor was ``joined``. Returns the number of parts that are sent."""
        cut: dict[tuple[str, str], list[Tensor]] = {}
        for edge in edges:
            key = edge.module, edge.bridge
            i, _ = edge.part
            if key not in cut:
                cut[key] = self._parts_of(edge, tensor_of(edge), joined)
            if edge.travels:
                cut[key][i] = in_one_block(cut[key][i].detach())
            (self.leaving if edge.travels else self.arrived)[(edge.name, mb)] = cut[key][i].detach()
        return sum(edge.travels for edge in edges)

    def _parts_of(self, edge: Edge, whole: Tensor, joined: Mapping[str, Sequence[torch.Size]]) -> list[Tensor]:
        count = edge.part[1]
        if count == 1:
            return [whole]
        if edge.module in joined:
            return list(self.parts.cut_gradient(edge, whole, joined[edge.module]))
        return list(self.parts.cut(edge, whole, count))

    def _released(self, at: Task) -> None:
        """Called when a send is over. With the last send of an output its data is freed."""
        del self.leaving[(at.tensor, at.mb)]
        if at.op == ins.FREE_F:
            cell = self.chunk_of[at.tensor], at.mb
            self.unsent[cell] -= 1
            if not self.unsent[cell]:
                del self.unsent[cell]
                self._drop(cell)

    def _drop(self, cell: _Cell) -> None:
        with suppress(KeyError):  # evaluation keeps none, and the backward may have used it up
            if self.engine.deallocate:
                self.outputs[cell] = self.engine.steps.backward_root(self.outputs[cell])

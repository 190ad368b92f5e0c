"""Messages between two stages for one microbatch: any number of tensors, each of its own shape and dtype.

The engine moves one value per (stage, microbatch); here it is a ``Hop``, which the engine does not look into.
``HopRunner`` runs the instructions that move hops: one message per tensor, in the order of the tensors, on the channel
of the plan's instruction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pp.comm.communicator import Receive, Send
from megatron_pp.comm.transport import ACT, GRAD
from megatron_pp.errors import P2PShapeError, ScheduleInputError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.compute import each_tensor, in_one_block
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor


class TensorMeta(NamedTuple):
    """A tensor between two stages. ``requires_grad``: a gradient is sent back for it. ``comes_back``: where False, no
    later stage was found to use it where a backward passes, so that what is sent may be zeros for no gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    comes_back: bool = True


Edge = tuple[TensorMeta, ...]  # what a stage gives the next one


@dataclass(eq=False, slots=True)
class Hop:
    """Tensors of one microbatch between two stages, gradients of them (None where there is none), or the places in the
    graph that are left of them."""

    tensors: Sequence[Any]


@dataclass(eq=False, slots=True)
class Transfers:
    """The handles of a hop's messages, in the place of one handle. ``later``: what is received behind them and posts
    itself, where the shape of a tensor travels ahead of it: a shape that is waited for before its tensor is posted."""

    handles: list[Any]
    later: Sequence[Callable[[], Any]] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return [handle.tensor for handle in self.handles]

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        later, self.later = self.later, ()
        for post in later:
            self.handles.append(post())
            self.handles[-1].wait()

    def check(self) -> None:
        for handle in self.handles:
            handle.check()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self.handles)


class HopRunner:
    """``edges``: of all stages but the last. ``trains``: whether gradients come back."""

    tables: Mapping[str, Mapping[Any, Any]] = {}

    def __init__(self, edges: Sequence[Edge], trains: bool) -> None:
        self.edges = edges
        self.trains = trains

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        self.engine: PlanExecutor = weakref.proxy(engine)
        handlers |= dict.fromkeys(ins.POST_OPS, self._post)
        handlers |= {
            ins.BATCH: self._batch,
            ins.FORWARD: partial(self._forward, handlers[ins.FORWARD]),
            **{op: partial(self._backward, handlers[op]) for op in ins.BACKWARD_OPS},
            ins.WAIT_F: self._wait_f,
            ins.WAIT_B: self._wait_b,
            ins.HAND_F: self._hand_f,
            ins.HAND_B: self._hand_b,
        }

    def _forward(self, handler: Handler, at: Task) -> None:
        handler(at)
        if self.engine.placement.crosses_ranks(at.stage):
            _make_contiguous(self.engine.outputs.get(at.key))

    def _backward(self, handler: Handler, at: Task) -> None:
        handler(at)
        if self.engine.placement.crosses_ranks(at.stage - 1):
            _make_contiguous(self.engine.input_grads.get(at.key))

    def requests(self, at: Task) -> list[Send | Receive]:
        """The requests that ``at`` posts: one per tensor, or per tensor that has a gradient."""
        engine = self.engine
        forward = at.op in (ins.SEND_F, ins.RECV_F)
        edge = self.edges[at.stage if at.op in (ins.SEND_F, ins.RECV_B) else at.stage - 1]
        moved = range(len(edge)) if forward else [k for k, meta in enumerate(edge) if meta.requires_grad]
        channel = ACT if forward else GRAD
        if at.op in ins.RECV_OPS:
            leaf = forward and self.trains
            metas = [edge[k] for k in moved]
            return [Receive(m.shape, at.peer, channel, leaf and m.requires_grad, m.dtype) for m in metas]
        tensors = (engine.outputs if forward else engine.input_grads)[at.key].tensors
        return [Send(tensors[k], at.peer, channel, edge[k].dtype) for k in moved]

    def _post(self, at: Task) -> None:
        requests = self.requests(at)
        one_by_one = at.op in ins.RECV_OPS and self.engine.communicator.variable_shapes
        now, later = (requests[:1], requests[1:]) if one_by_one else (requests, [])
        handles = [self._posted(at, request) for request in now]
        waits = [partial(self.engine.communicator.post_recv, *request) for request in later]
        self.engine.handles[at.message] = Transfers(handles, waits)  # type: ignore[assignment]

    def _posted(self, at: Task, request: Send | Receive) -> Any:
        self.engine.post(at, request)
        return self.engine.handles.pop(at.message)

    def _batch(self, at: Task) -> None:
        requests = [self.requests(one) for one in at.members]
        handles = iter(self.engine.communicator.post_batch([one for several in requests for one in several]))
        for one, several in zip(at.members, requests, strict=True):
            self.engine.handles[one.message] = Transfers([next(handles) for _ in several])  # type: ignore[assignment]

    def _arrived(self, at: Task) -> list[Tensor]:
        transfers: Any = self.engine.handles.pop(at.message)
        transfers.wait()
        return transfers.tensors

    def _wait_f(self, at: Task) -> None:
        self.engine.inputs[at.key] = Hop(self._arrived(at))

    def _wait_b(self, at: Task) -> None:
        arrived = iter(self._arrived(at))
        self.engine.output_grads[at.key] = Hop(
            [next(arrived) if meta.requires_grad else None for meta in self.edges[at.stage]]
        )

    def _hand_f(self, at: Task) -> None:
        source = (at.stage - 1, at.mb, at.part)
        given = zip(self.engine.outputs[source].tensors, self.edges[at.stage - 1], strict=True)
        self.engine.inputs[at.key] = Hop(
            [tensor.detach().requires_grad_(self.trains and meta.requires_grad) for tensor, meta in given]
        )
        self.engine.drop_data(source)

    def _hand_b(self, at: Task) -> None:
        self.engine.output_grads[at.key] = self.engine.input_grads.pop((at.stage + 1, at.mb, at.part))


def _make_contiguous(hop: Any) -> None:
    """Within the operation that has made ``hop``, of which another rank gets the tensors."""
    if isinstance(hop, Hop):
        hop.tensors = each_tensor(in_one_block, hop.tensors)


def checked_hop(tensors: Sequence[Any], edge: Edge, stage: int, mb: int, trains: bool, vary: bool) -> Hop:
    """What ``stage`` gives the next one. Raises P2PShapeError where it is not what the ranks have found, for which the
    next stage has its buffers, ScheduleInputError where a gradient would be lost. ``vary``: shapes may differ."""
    found = [(tuple(t.shape), t.dtype) if isinstance(t, Tensor) else type(t).__name__ for t in tensors]
    wanted = [(meta.shape, meta.dtype) for meta in edge]
    if [one[1:] for one in found] != [one[1:] for one in wanted] if vary else found != wanted:
        raise P2PShapeError(
            f"stage {stage} gives {_shown(found)} for microbatch {mb}, but {_shown(wanted)} when the ranks exchanged "
            "shapes, and the next stage has buffers of these; if shapes vary, set variable_seq_lengths in its config"
        )
    for k, (tensor, meta) in enumerate(zip(tensors, edge, strict=True)):
        if trains and tensor.requires_grad and not meta.requires_grad:
            raise ScheduleInputError(
                f"output {k} of stage {stage} requires a gradient for microbatch {mb}, but did not for the first "
                "microbatch, by which the ranks decided that no gradient is sent back for it. Let the stage call "
                "requires_grad_() on this output in every microbatch"
            )
    return Hop(tensors)


def _shown(found: Sequence[Any]) -> str:
    return ", ".join(f"{list(one[0])} {one[1]}" if isinstance(one, tuple) else f"a {one}" for one in found) or "nothing"

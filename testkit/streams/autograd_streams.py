"""The streams on which autograd runs, and its waits, by the rules of torch's engine (``engine.cpp`` and
``input_buffer.cpp`` in ``torch/csrc/autograd``). On a CPU torch has no such rules.

The backward of an operation runs on the stream that was current in its forward. A parameter's AccumulateGrad lives as
long as a graph holds it, and runs on the stream where the first of these graphs was made (pytorch#137483). A node waits
for the streams that gave it a gradient, also for the caller's stream, and for no other. Gradients are added up on the
stream of the node that takes them. At the end the caller's stream waits for the stream of each leaf, and of no other
node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from testkit.streams.timelines import Clock, Lane, Transfer

Gradient = torch.Tensor | None
_STREAM = "megatron_pp: stream"  # key in a node's ``metadata``, which lives as long as the node


class _Event(NamedTuple):
    """A recorded event for which a stream waits. ``number``: its number in the log."""

    clock: Clock
    pending: Iterable[Transfer]
    number: int

    @classmethod
    def on(cls, lane: Lane) -> _Event:
        return cls(dict(lane.now()), set(lane.unfinished()), lane.record())


class _Sum(NamedTuple):
    """The engine's next operation adds up two gradients on ``lane``."""

    lane: Lane
    operands: tuple[_Event | None, _Event | None]  # None: both gradients are of the same stream

    def begin(self) -> None:
        for operand in self.operands:
            if operand is not None:
                self.lane.wait_for(*operand)


@dataclass
class _Task:
    """A run of the engine. ``lanes``: the streams of its nodes. ``ready``: by node and place, when a gradient is ready.
    ``node``: the running node. ``leaves``: the streams of nodes that passed no gradient on."""

    caller: Lane
    lanes: dict[Any, Lane]
    ready: dict[Any, dict[int, _Event | None]] = field(default_factory=dict)
    node: Any = None
    has_begun: bool = False
    sums: deque[_Sum] = field(default_factory=deque)
    leaves: dict[Lane, None] = field(default_factory=dict)


class NodeStreams:
    """The current stream of a rank, within and outside of backwards. ``record``: ``Tensor.record_stream``.
    ``is_on_host``: whether a tensor is in host memory, so that streams do not matter."""

    def __init__(
        self,
        default: Lane,
        record: Callable[[torch.Tensor, Lane], None],
        is_on_host: Callable[[torch.Tensor], bool],
    ) -> None:
        self._current = default
        self._record = record
        self._is_on_host = is_on_host
        self._tasks: list[_Task] = []

    def current(self) -> Lane:
        if self._tasks:
            self._follow(self._tasks[-1])
        return self._current

    def set(self, stream: Lane) -> None:
        self.current()
        self._current = stream

    def of_next_operation(self) -> Lane:
        """The stream of the operation that is issued next."""
        stream = self.current()
        if self._tasks and self._tasks[-1].sums:
            following = self._tasks[-1].sums.popleft()
            following.begin()
            self._current = stream = following.lane
        return stream

    # -- forward -------------------------------------------------------------------------------------------------------

    def made(self, results: Iterable[torch.Tensor]) -> None:
        """An operation has returned ``results``: the nodes that it made belong to the current stream."""
        for result in results:
            node: Any = result.grad_fn
            if node is not None and _STREAM not in node.metadata:
                self._claim(node, self.current())

    def _claim(self, node: Any, stream: Lane) -> None:
        unclaimed = [node]
        while unclaimed:
            node = unclaimed.pop()
            if _STREAM not in node.metadata:
                node.metadata[_STREAM] = stream
                unclaimed += [following for following, _ in node.next_functions if following is not None]

    # -- backward ------------------------------------------------------------------------------------------------------

    @contextmanager
    def backward(self, roots: Sequence[Any], grads: Sequence[Gradient], inputs: Sequence[Any]) -> Iterator[None]:
        """The engine runs from ``roots`` with ``grads``, for the gradients of ``inputs`` or, without, of all leaves."""
        edges, wanted = [*map(_edge, roots)], [*map(_edge, inputs)]
        task = _Task(self.current(), {})
        for edge in edges:
            self._claim(edge.node, task.caller)
        with ExitStack() as hooks:
            for node in _reachable(edges):
                task.lanes[node] = node.metadata[_STREAM]
                hooks.callback(node.register_hook(partial(self._ran, task, node)).remove)
            self._tasks.append(task)
            try:
                for edge, grad in zip(edges, grads, strict=True):
                    self._pass_on(task, grad, task.caller, edge.node, edge.output_nr)
                yield
            finally:
                self._capture(task, [edge.node for edge in wanted])
                self._end(task)
                self._tasks.remove(task)

    def _follow(self, task: _Task) -> None:
        node = torch._C._current_autograd_node()
        if node is task.node:
            return
        if node in task.lanes:
            self._enter(task, node)
        elif task.has_begun:  # callbacks, after the last node
            self._end(task)

    def _enter(self, task: _Task, node: Any) -> None:
        self._sum_up(task)
        task.node = node
        task.has_begun = True
        self._current = task.lanes[node]
        for event in task.ready.pop(node, {}).values():
            if event is not None:
                self._current.wait_for(*event)

    def _ran(self, task: _Task, node: Any, given: Sequence[Gradient], taken: Sequence[Gradient]) -> None:
        """The node has turned the gradients ``taken`` into ``given``."""
        if task.node is not node:
            self._enter(task, node)
        stream = task.lanes[node]
        if not given:
            task.leaves[stream] = None
        for grad, (following, place) in zip(given, node.next_functions, strict=False):
            if following is not None:
                self._pass_on(task, grad, stream, following, place)

    def _pass_on(self, task: _Task, grad: Gradient, stream: Lane, to: Any, place: int) -> None:
        """``grad``, from ``stream``, is for ``to``."""
        if grad is None or self._is_on_host(grad):
            return
        target = task.lanes[to]
        ready = task.ready.setdefault(to, {})
        event = None
        if target is not stream:
            self._record(grad, target)
            event = _Event.on(stream)
        if place in ready:
            task.sums.append(_Sum(target, (event, ready[place])))
            event = None
        ready[place] = event

    def _sum_up(self, task: _Task) -> None:
        while task.sums:
            task.sums.popleft().begin()

    def _capture(self, task: _Task, wanted: Sequence[Any]) -> None:
        for node in wanted:
            if node in task.lanes:
                if node in task.ready:  # the node did not run
                    self._enter(task, node)
                task.leaves[task.lanes[node]] = None

    def _end(self, task: _Task) -> None:
        self._sum_up(task)
        for leaf in task.leaves:
            if leaf is not task.caller:
                task.caller.wait_for_lane(leaf)
        self._current = task.caller


def _edge(of: torch.Tensor | GradientEdge) -> GradientEdge:
    return of if isinstance(of, GradientEdge) else get_gradient_edge(of)


def _reachable(edges: Sequence[GradientEdge]) -> Iterator[Any]:
    seen = {edge.node: None for edge in edges}
    unknown = list(seen)
    while unknown:
        node = unknown.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen[following] = None
                unknown.append(following)

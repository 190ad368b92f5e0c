"""The store of deferred weight gradients, and the delivery of all gradients of a pipeline step.

Split layers queue their weight gradients here; all other gradients arrive through *parameter leaves*
(``parameter_leaf.py``). For each parameter the store adds up the gradients of one backward in autograd's order, and
passes the sum to the parameter's tensor hooks. It fires accumulation hooks once, with the last gradient.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_pp.errors import WeightGradError
from megatron_pp.plan.ir.tasks import MbPart
from megatron_pp.weight_grad.deferred import Deferred, Ready, SplitLayer, Waiting, frozen, versions
from megatron_pp.weight_grad.linear import Casts
from megatron_pp.weight_grad.parameter_leaf import (
    accumulates,
    add_and_fire,
    add_silently,
    follow,
    gradient_dtype,
    in_its_dtype,
    is_dummy_grad,
    new_leaf,
    take_gradient,
)
from megatron_pp.weight_grad.report import SplitReport, warn_of
from megatron_pp.weight_grad.transformer_engine import DelayedRun, SwitchedQueue, hooked_names

ChunkPart = tuple[int, MbPart]  # (chunk, microbatch or a part of it)
_NEVER = -1  # a chunk that never completes: for parameters whose layer fires their hooks itself


@dataclass
class _Backward:
    key: ChunkPart
    split: bool
    final: bool  # whether this (chunk, microbatch) completes the chunk's gradients
    whole: dict[int, Tensor]  # id -> parameter whose gradient autograd computes
    task: int = -1  # autograd's id of its run in this backward
    left: set[int] = field(default_factory=set)  # ids of parameters with queued gradients
    switched: dict[int, DelayedRun] = field(default_factory=dict)  # id of a parameter of a layer with a SwitchedQueue

    def puts_off(self, weight: Tensor) -> bool:
        """Whether a layer queues its gradients. A split backward queues them for W. The last backward of a chunk queues
        them until autograd's run has ended, because hooks must not fire within it."""
        return (self.split or self.final) and id(weight) not in self.whole


class OwnedLayer(NamedTuple):
    """A converted layer. ``delays``: whether it has a queue of its own, built in or ``switched`` on."""

    layer: nn.Module
    chunk: int
    delays: bool
    switched: SwitchedQueue | None


class WeightGradStore:
    """Weight gradients of one rank's model chunks. ``split_weight_grad`` makes it; the engine calls it in each step:

    with store.step({chunk: microbatch whose B or W is the last of the chunk}):
        with store.backward(chunk, mb, split=True): ...   # B; split=False: a full backward
        store.run(chunk, mb)                              # W
    """

    def __init__(self) -> None:
        self.anchor = torch.zeros((), requires_grad=True)  # gives an output a graph if no input has one
        self.report = SplitReport()
        self.shares: dict[str, tuple[str, float]] = {}  # layer's name -> its class, its share of the FLOPs
        self.wrappers_known = False  # whether the wrappers around the layers were checked
        self.timers: Callable[..., Any] | None = None  # Megatron's timers: "weight-compute" runs around every W
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self.anchor).node
        self._whole: dict[int, Tensor] = {}
        self._logged: set[tuple[str, str]] = set()
        self.layers: list[OwnedLayer] = []
        self.abort_step()

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles of a converted model are not converted, so they have None for the store."""
        return type(None), ()

    # -- called by the engine --------------------------------------------------------------------------------------

    @contextmanager
    def step(self, last: Mapping[int, MbPart]) -> Iterator[None]:
        """``begin_step``, and ``abort_step`` at the end. Raises WeightGradError if a backward has no W."""
        self.begin_step(last)
        try:
            yield
            left = self.waiting()
        finally:
            self.abort_step()
        if left:
            raise WeightGradError(
                f"weight gradients of (chunk, microbatch) {left} were left behind: each B that is split needs its W"
            )

    def begin_step(self, last: Mapping[int, MbPart]) -> None:
        """Start a step. ``last`` names, per chunk, the microbatch whose W (or unsplit B) completes the chunk's
        gradients."""
        self.abort_step()
        self._last.update(last)
        self._look_up_parameters()
        for owned in self.layers:
            if owned.switched is not None:
                owned.switched.open()
        self.armed = True

    def waiting(self) -> list[ChunkPart]:
        """The (chunk, microbatch) pairs whose B has run and whose W has not, sorted."""
        return sorted(self._queues)

    def abort_step(self) -> None:
        self.armed = self.delivering = False
        for owned in self.layers:
            if owned.switched is not None:
                owned.switched.close()
        self.casts = Casts()
        self._current: _Backward | None = None
        self._last: dict[int, MbPart] = {}
        self._chunks_of: dict[Tensor, set[int]] = {}
        self._leaves: dict[int, Tensor] = {}  # id of a parameter -> its leaf
        self._queues: dict[ChunkPart, deque[Waiting]] = {}
        self._complete: set[int] = set()
        self._touched: dict[Tensor, None] = {}  # in the order of the first gradient
        self._fired: set[Tensor] = set()

    @contextmanager
    def backward(self, chunk: int, mb: MbPart, split: bool = True) -> Iterator[None]:
        """A context for the backward of (chunk, mb). With ``split`` it computes only input gradients, otherwise all.
        For a part of a microbatch ``mb`` is (mb, part)."""
        key = (chunk, mb)
        if not self.armed:
            raise WeightGradError(
                f"backward of chunk {chunk}, microbatch {mb} outside of a step: call begin_step first"
            )
        if key in self._queues:
            raise WeightGradError(f"backward of chunk {chunk}, microbatch {mb} ran twice")
        delaying = [owned for owned in self.layers if owned.delays and owned.chunk == chunk]
        delayed = [DelayedRun(owned.layer, owned.switched is not None) for owned in delaying]
        self._queues[key] = deque()
        self.casts.clear()
        now = self._current = _Backward(key, split, self._last.get(chunk) == mb, self._whole)
        for run in delayed:
            if run.switched:
                now.switched.update((id(parameter), run) for parameter in run.parameters)
        try:
            yield
        finally:
            self._current = None
            self.casts.clear()
            for run in delayed:
                run.end_backward()
        self._queues[key].extend(Waiting(-1, run, 0, frozen(run.parameters)) for run in delayed)
        if not split:
            self.run(chunk, mb)

    def run(self, chunk: int, mb: MbPart) -> None:
        """Run W: compute and deliver the weight gradients that the backward of (chunk, mb) left, first in, first
        out."""
        key = (chunk, mb)
        queue = self._queues.pop(key, None)
        if queue is None:
            raise WeightGradError(
                f"no weight gradients of chunk {chunk}, microbatch {mb} wait: its backward has not run"
            )
        final = self._last.get(chunk) == mb
        if final:
            self._complete.add(chunk)
        if self.timers is not None:
            self.timers("weight-compute", log_level=2).start()
        self.delivering = True
        with torch.no_grad():
            self._work_off(queue)
            if final:
                self._fire_the_rest()
        self.delivering = False
        if self.timers is not None:
            self.timers("weight-compute").stop()

    def kept_tensors(self, chunk: int, mb: MbPart) -> list[Tensor]:
        """Tensors that the backward of (chunk, mb), which has just ended, keeps for W."""
        tensors: list[Tensor] = []
        for waiting in self._queues.get((chunk, mb), ()):
            tensors += waiting.deferred.kept
            if isinstance(waiting.deferred, DelayedRun):
                tensors += waiting.deferred.queued()
        return tensors

    # -- called by layers ------------------------------------------------------------------------------------------

    def leaf_of(self, parameter: Tensor | None) -> Tensor | None:
        """The leaf of a parameter that is trained in this step. None for any other argument."""
        leaf = self._leaves.get(id(parameter))
        if leaf is None or parameter is None or not parameter.requires_grad:
            return None
        if leaf.data_ptr() != parameter.data_ptr():
            follow(leaf, parameter)
        return leaf

    def keep_whole(self, layer: SplitLayer, reason: str) -> None:
        """Let autograd compute all gradients of a layer's weight from now on; logged once."""
        if id(layer.weight) in self._leaves:
            self._whole[id(layer.weight)] = layer.weight
        if (layer.name, reason) not in self._logged:
            self._logged.add((layer.name, reason))
            kind, share = self.shares.get(layer.name, ("", 0.0))
            warn_of(layer.name, reason, kind, share)

    def running(self) -> _Backward | None:
        """The pipeline backward that autograd runs. None in ``autograd.grad``, even if a backward calls it."""
        current = self._current
        if current is None or torch.is_grad_enabled():
            return None
        task = torch._C._current_graph_task_id()
        if task != current.task:
            if not accumulates(self._anchor_node):
                return None
            current.task = task
        return current

    def leave(self, deferred: Deferred) -> None:
        """Queue ``deferred``. Called by a layer's backward if ``running()`` puts its gradients off."""
        current = self._current
        parameters = deferred.parameters
        assert current is not None
        current.left.update(map(id, parameters))
        self._queues[current.key].append(Waiting(current.task, deferred, versions(deferred), frozen(parameters)))

    def arrive(self, parameter: Tensor, leaf: Tensor) -> None:
        """Called when autograd has finished a leaf's gradient. The leaf has none if layers queued the gradient, or
        added it to ``main_grad`` themselves. In the second case it may also have a dummy."""
        current = self._current
        grad = take_gradient(leaf)
        run = None if current is None else current.switched.get(id(parameter))
        if run is not None and grad is not None and run.takes(parameter, grad):
            return
        if grad is None or is_dummy_grad(parameter):
            left = current is not None and id(parameter) in current.left
            if not left and getattr(parameter, "main_grad", None) is not None:
                self._touched[parameter] = None
            return
        if current is None:
            raise WeightGradError(
                "a converted layer's backward ran outside of the step's store.backward(chunk, mb): run it before "
                "or after the step, or leave the layer unconverted"
            )
        if not parameter.requires_grad:  # frozen after its forward: autograd drops its gradient
            return
        self._touched[parameter] = None
        if current.final or id(parameter) in current.left:
            task = torch._C._current_graph_task_id()
            ready = Ready((parameter,), (grad,))
            self._queues[current.key].append(Waiting(task, ready, versions(ready)))
        else:
            with torch.no_grad():
                add_silently(parameter, grad)

    # -- delivery --------------------------------------------------------------------------------------------------

    def _work_off(self, queue: deque[Waiting]) -> None:
        """Compute and deliver all entries of a queue. A parameter's gradients from one run of autograd are added up
        first."""
        left = [id(parameter) for waiting in queue for parameter in waiting.deferred.parameters]
        sums = _Sums(queue) if len(set(left)) < len(left) else None
        while queue:
            task, deferred, then, frozen_then = queue.popleft()
            if queue:
                queue[0].deferred.prepare()
            if versions(deferred) != then:
                raise WeightGradError(
                    f"the input of layer {deferred.name}, or the gradient of its output, was changed in place between "
                    "its B and its W, which still needs it"
                )
            for parameter, grad in deferred.compute():
                if id(parameter) in frozen_then:
                    grad = None
                if sums is not None:
                    grad, complete = sums.add(task, parameter, grad)
                    if not complete:
                        continue
                elif grad is not None:
                    grad = in_its_dtype(parameter, grad)
                self._deliver(parameter, grad)

    def _deliver(self, parameter: Tensor, grad: Tensor | None) -> None:
        self._touched[parameter] = None
        if self._chunks_of[parameter] <= self._complete:
            self._fired.add(parameter)
            add_and_fire(parameter, grad)
        elif grad is not None:
            add_silently(parameter, grad)

    def _fire_the_rest(self) -> None:
        """Fire the hooks of parameters without a gradient in the chunk's last microbatch."""
        for parameter in reversed(list(self._touched)):
            if parameter not in self._fired and self._chunks_of[parameter] <= self._complete:
                self._fired.add(parameter)
                add_and_fire(parameter, None)

    def _look_up_parameters(self) -> None:
        """Look up the chunks and the leaf of each parameter, in each step, because parameters may be replaced."""
        for layer, chunk, delays, switched in self.layers:
            hooked = hooked_names(layer) if delays and switched is None else ()
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    chunks = (chunk, _NEVER) if name in hooked else (chunk,)
                    self._chunks_of.setdefault(parameter, set()).update(chunks)
        self._whole = {key: weight for key, weight in self._whole.items() if weight in self._chunks_of}
        self._leaves.update((id(p), new_leaf(p, self.arrive)) for p in self._chunks_of if p.requires_grad)


class _Sums:
    """Adds up the gradients of a parameter if one run of autograd queued several."""

    def __init__(self, queue: Iterable[Waiting]) -> None:
        self._to_come = Counter((waiting.task, id(p)) for waiting in queue for p in waiting.deferred.parameters)
        self._sums: dict[tuple[int, int], dict[torch.dtype, Tensor]] = {}  # autocast adds in the lower precision first

    def add(self, task: int, parameter: Tensor, grad: Tensor | None) -> tuple[Tensor | None, bool]:
        """Add one gradient. With the last one, returns (the sum in the dtype of the parameter's gradient, True)."""
        key = (task, id(parameter))
        self._to_come[key] -= 1
        if grad is not None:
            if gradient_dtype(parameter) is not parameter.dtype:
                grad = in_its_dtype(parameter, grad)
            sums = self._sums.setdefault(key, {})
            sums[grad.dtype] = sums[grad.dtype].add_(grad) if grad.dtype in sums else grad
        if self._to_come[key]:
            return None, False
        total: Tensor | None = None
        for part in self._sums.pop(key, {}).values():
            part = in_its_dtype(parameter, part)
            total = part if total is None else total + part
        return total, True

"""Backward in two halves for any layer, by autograd's own graph: input gradients first (I), weight gradients later (W).

The graph of a backward has a *chain*: the nodes from which an input of the stage is reached. I runs the chain, and
notes the gradients that come to each of its nodes with a way to parameters beside the chain; W runs such a node again,
for the parameters alone. A parameter that several such nodes reach has its gradient in I, as it is one sum; it is
delivered in W. The graph stays until W: a layer that ``split_weight_grad`` has converted keeps less.

Where no input has a gradient, as on the first stage, all of the backward is in W. A stage's ``dw_builder`` is called
as torch calls it: backward leaves the weight gradients to what it returns, which is called in W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from megatron_pp.plan.ir.tasks import MbSlice
from megatron_pp.runtime.deallocate import Root, run_backward
from megatron_pp.weight_grad.parameter_leaf import add_and_fire, add_hooked
from megatron_pp.weight_grad.report import SplitReport

Key = tuple[int, MbSlice]
Grads = Sequence[Tensor | None]


@dataclass
class _Junction:
    """A node of the chain, or a root beside it, with the parameters beside the chain that it alone reaches."""

    node: Node
    parameters: list[Tensor] = field(default_factory=list)
    grads: Grads = ()  # of its outputs, by number


@dataclass
class _Left:
    """What an I leaves to its W."""

    junctions: Sequence[_Junction] = ()
    ready: Sequence[tuple[Tensor, Tensor]] = ()  # gradients that I has computed
    whole: tuple[Sequence[Root], Grads] | None = None  # a backward that is all in W


class AutogradSplit:
    """In the place of a ``WeightGradStore``, which has the methods that the engine calls. ``modules``, ``dw_builders``:
    of this rank's chunks."""

    report = SplitReport()
    wrappers_known = True

    def __init__(self, modules: Sequence[torch.nn.Module], dw_builders: Sequence[Callable[[], Any] | None]) -> None:
        self.modules, self.dw_builders = modules, dw_builders
        self._begin({})

    def _begin(self, last: Mapping[int, MbSlice]) -> None:
        self._last = dict(last)
        self._left: dict[Key, _Left] = {}
        self._runners: dict[Key, Any] = {}
        self._splits: Key | None = None  # the (chunk, microbatch) of the I that runs

    @contextmanager
    def step(self, last: Mapping[int, MbSlice]) -> Iterator[None]:
        """``last``: per chunk, the microbatch that completes its gradients."""
        self._begin(last)
        try:
            yield
        finally:
            self._begin({})

    @contextmanager
    def backward(self, chunk: int, mb: MbSlice, split: bool = True) -> Iterator[None]:
        """Around the backward of (chunk, mb): an I where ``split``, else a whole backward."""
        builder = self.dw_builders[chunk]
        self._splits = (chunk, mb) if split and builder is None else None
        try:
            yield
        finally:
            self._splits = None
        if builder is not None:
            runner = builder()
            if split:
                self._runners[chunk, mb] = runner
            else:
                runner()

    def run_backward(self, roots: Sequence[Root], grads: Grads, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Backward from ``roots``; returns the gradients of ``inputs``. In an I those alone are computed."""
        key, trained = self._splits, [tensor for tensor in inputs if tensor.requires_grad]
        if key is None:
            if roots:
                run_backward(roots, grads)
            return [tensor.grad for tensor in inputs]
        if not trained or not roots:
            self._left[key] = _Left(whole=(roots, grads) if roots else None)
            return [None] * len(inputs)
        parameters = {get_gradient_edge(p).node: p for p in self.modules[key[0]].parameters() if p.requires_grad}
        junctions, shared = _junctions(roots, grads, trained, parameters)
        handles = [one.node.register_prehook(partial(_note, one)) for one in junctions if not one.grads]
        starts: Any = roots
        try:
            found = torch.autograd.grad(starts, [*trained, *shared], grads, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        known = {_memory(grad) for grad in (*grads, *found[: len(trained)]) if grad is not None}
        ready = _owned(zip(shared, found[len(trained) :], strict=True), known)
        self._left[key] = _Left(junctions, list(ready))
        of_inputs = iter(found)
        return [next(of_inputs) if tensor.requires_grad else None for tensor in inputs]

    def run(self, chunk: int, mb: MbSlice) -> None:
        """W of (chunk, mb)."""
        if self.dw_builders[chunk] is not None:
            self._runners.pop((chunk, mb))()
            return
        left = self._left.pop((chunk, mb))
        if left.whole is not None:
            run_backward(*left.whole)
            return
        for parameter, grad in _weight_gradients(left):
            add_hooked(parameter, grad)
        if self._last.get(chunk) == mb:
            for parameter in reversed(list(self.modules[chunk].parameters())):
                if parameter.requires_grad and parameter.grad is not None:
                    add_and_fire(parameter, None)


def _junctions(
    roots: Sequence[Root], grads: Grads, inputs: Sequence[Tensor], parameters: Mapping[Node, Tensor]
) -> tuple[list[_Junction], list[Tensor]]:
    """The junctions of a backward, and the parameters that several of them reach."""
    starts = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    chain = _nodes_to({get_gradient_edge(tensor).node for tensor in inputs}, [start.node for start in starts])
    found = [_Junction(node) for node in chain]
    reached = [_reached_from(_beside(one.node, chain), parameters) for one in found]
    for start, grad in zip(starts, grads, strict=True):
        if start.node not in chain:
            found.append(_Junction(start.node, grads=(*[None] * start.output_nr, grad)))
            reached.append(_reached_from([start.node], parameters))
    times = Counter(parameter for several in reached for parameter in several)
    for one, several in zip(found, reached, strict=True):
        one.parameters = [parameter for parameter in several if times[parameter] == 1]
    return [one for one in found if one.parameters], [parameter for parameter, count in times.items() if count > 1]


def _nodes_to(ends: Collection[Node], starts: Iterable[Node]) -> dict[Node, None]:
    """The nodes from which one of ``ends`` is reached, in an order that does not change from run to run."""
    found, seen = dict.fromkeys(ends), set[Node]()
    stack = [(node, False) for node in starts]
    while stack:
        node, children_known = stack.pop()
        if children_known:
            if any(child in found for child, _ in node.next_functions):
                found[node] = None
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return found


def _beside(node: Node, chain: Collection[Node]) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None and child not in chain]


def _reached_from(starts: Iterable[Node], parameters: Mapping[Node, Tensor]) -> list[Tensor]:
    found, seen, stack = [], set[Node](), list(starts)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in parameters:
            found.append(parameters[node])
        stack += [child for child, _ in node.next_functions if child is not None]
    return found


def _weight_gradients(left: _Left) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, gradient) of a W; each gradient has memory of its own, to which later ones may be added."""
    known = {_memory(grad) for one in left.junctions for grad in one.grads if grad is not None}
    yield from left.ready
    for one in left.junctions:
        starts = [(GradientEdge(one.node, k), grad) for k, grad in enumerate(one.grads) if grad is not None]
        if not starts:
            continue  # no gradient came to it
        edges, grads = zip(*starts, strict=True)
        found = torch.autograd.grad(edges, one.parameters, grads, allow_unused=True)
        yield from _owned(zip(one.parameters, found, strict=True), known)


def _owned(found: Iterable[tuple[Tensor, Tensor | None]], known: set[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Those that there are, as clones where they are memory of something ``known``: autograd passes the gradient of a
    sum on as it is."""
    for parameter, grad in found:
        if grad is not None:
            grad = grad.clone() if _memory(grad) in known else grad
            known.add(_memory(grad))
            yield parameter, grad


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _note(junction: _Junction, grads: Grads) -> None:
    junction.grads = grads

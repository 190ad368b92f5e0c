"""Finds the shapes, dtypes and gradients of the tensors between stages, by a forward of each stage.

As in torch's runtime the stages run one after the other on the first microbatch: the first stage with its arguments,
each later one with tensors of zeros. This happens before the first step, and again if a rank's parameters or arguments
have changed in a way that matters to shapes or gradients (``signature``). It leaves the modules unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.torch_pipelining.agreement import Ranks, RefusedError
from megatron_pp.integrations.torch_pipelining.batch import Batch
from megatron_pp.integrations.torch_pipelining.hops import Edge, TensorMeta
from megatron_pp.integrations.torch_pipelining.module_state import unchanged
from megatron_pp.integrations.torch_pipelining.stage_calls import StageCall
from megatron_pp.plan.ir.placement import Placement

# FSDP2's node on all inputs of a sharded module. The gradient of an input goes to that input only.
_PASSES_EACH_ON = "RegisterPostBackwardFunctionBackward"
Links = list[list[int]] | None
"""For each input of a stage, the outputs from which a backward reaches it; None if that is not known."""


def signature(calls: Sequence[StageCall], batch: Batch, trains: bool, shapes_vary: bool) -> tuple[Any, ...]:
    """A value that changes whenever, because of this rank, shapes or gradients of tensors between stages may change. It
    is made of the trained parameters and the first microbatch, whose shapes do not count if shapes vary."""
    trained: list[bool] = []
    if trains:
        trained = [parameter.requires_grad for call in calls for parameter in call.stage.submod.parameters()]
    given: list[Any] = []
    for tensor in tree_leaves((batch.args[0], batch.kwargs[0])):
        if isinstance(tensor, Tensor):
            given.append((None if shapes_vary else tuple(tensor.shape), tensor.dtype, trains and tensor.requires_grad))
    return tuple(trained), tuple(given)


class EdgeFinder:
    """Runs each stage once. All ranks make it and call it together. ``calls``: those of this rank's stages."""

    def __init__(self, calls: Sequence[StageCall], placement: Placement, ranks: Ranks, trains: bool) -> None:
        self.calls = {call.index: call for call in calls}
        self.placement = placement
        self.ranks = ranks
        self.trains = trains

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Edge]:
        """The tensors that each stage passes to the next one. ``args``, ``kwargs``: of the first microbatch.

        If a stage's forward raises, raises RefusedError with its error, on other ranks with a ScheduleInputError."""
        last = self.placement.num_stages - 1
        edges: list[Edge] = []
        links: list[Links] = []  # of the stages from the second on
        for stage in range(last + 1 if self.trains else last):
            edge, found = self._found(stage, args if stage == 0 else edges[-1], kwargs)
            if stage > 0:
                links.append(found)
            if stage < last:
                edges.append(edge)
        if self.trains:
            _mark_unused(edges, links)
        return edges

    def _found(self, stage: int, given: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Edge, Links]:
        found: Any = None
        error: Exception | None = None
        if stage in self.calls:
            try:
                found = self._outputs(self.calls[stage], given, kwargs)
            except Exception as raised:
                if self.calls[stage].is_last:  # its real inputs may be fine
                    found = (), None
                else:
                    error = raised
                    found = f"{type(raised).__name__}: {raised}"
        rank = self.placement.homes[stage][0]
        found = self.ranks.of_rank(rank, found)
        if error is None and isinstance(found, str):
            error = ScheduleInputError(f"stage {stage}, on pipeline rank {rank}, failed in its first forward: {found}")
        if error is not None:
            raise RefusedError(error)
        edge, links = found
        return edge, links

    def _outputs(self, call: StageCall, given: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Edge, Links]:
        module = call.stage.submod
        device = torch.device(call.stage.device)
        if isinstance(module, DistributedDataParallel):
            module = module.module  # without its hooks, which count forwards
        args = given if call.is_first else [_zeros(meta, device) for meta in given]
        args, kwargs = tree_map_only(Tensor, _alone, (args, kwargs))
        with unchanged(module, device), torch.enable_grad() if self.trains else nullcontext():
            outputs = call(args, kwargs, module)
        if call.is_last:
            return (), _links(tree_leaves(outputs), args) if self.trains else None
        for k, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor):
                raise ScheduleInputError(
                    f"output {k} of stage {call.index} is a {type(tensor).__name__}; a stage gives the next one tensors"
                )
        edge = tuple(TensorMeta(tuple(t.shape), t.dtype, self.trains and t.requires_grad) for t in outputs)
        return edge, _links(outputs, args) if self.trains else None


def _zeros(meta: TensorMeta, device: torch.device) -> Tensor:
    return torch.zeros(meta.shape, dtype=meta.dtype, device=device, requires_grad=meta.requires_grad)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without the caller's graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _links(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[list[int]]:
    """For each input, the outputs from which a backward reaches it."""
    reached = [_nodes_from(one) if isinstance(one, Tensor) and one.requires_grad else set() for one in outputs]
    found = []
    for one in inputs:
        node = get_gradient_edge(one).node if isinstance(one, Tensor) and one.requires_grad else None
        found.append([k for k, nodes in enumerate(reached) if node in nodes])
    return found


def _nodes_from(output: Tensor) -> set[Node]:
    """The nodes that a backward from ``output`` reaches."""
    seen: set[tuple[Node, int]] = set()  # with the place of the output from which they were reached
    start = get_gradient_edge(output)
    stack: list[tuple[Node | None, int]] = [(start.node, start.output_nr)]
    while stack:
        node, place = stack.pop()
        if node is not None and (node, place) not in seen:
            seen.add((node, place))
            after = node.next_functions
            stack += after[place : place + 1] if node.name() == _PASSES_EACH_ON else after
    return {node for node, _ in seen}


def _mark_unused(edges: list[Edge], links: Sequence[Links]) -> None:
    """Set ``comes_back``, from the last stage on. ``links[k]``: of the stage that gets ``edges[k]``."""
    of_last = links[-1] if links else None
    used: list[bool] | None = None if of_last is None else [bool(outputs) for outputs in of_last]
    for k in reversed(range(len(edges))):
        if k < len(edges) - 1:
            passed = links[k]
            after = edges[k + 1]
            used = None if passed is None else [any(after[j].comes_back for j in outputs) for outputs in passed]
        if used is not None:
            edges[k] = tuple(meta._replace(comes_back=one) for meta, one in zip(edges[k], used, strict=True))

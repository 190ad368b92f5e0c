"""The shapes and dtypes of what stages give each other, found in the first step by a forward of each stage.

As torch's runtime does: stage by stage, on the first microbatch, the first stage with its arguments and each later one
with tensors of zeros. Random numbers, buffers and gradients are afterwards as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.torch_pipelining.hops import Edge, TensorMeta
from megatron_pp.integrations.torch_pipelining.stage_calls import StageCall
from megatron_pp.plan.ir.placement import Placement


def find_edges(
    calls: Mapping[int, StageCall],
    placement: Placement,
    group: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    trains: bool,
) -> list[Edge]:
    """What each stage but the last gives the next one; on all ranks, which call this together. ``calls``: of this
    rank's stages, by number; ``args``, ``kwargs``: of the first microbatch.

    Raises what a stage's forward raises, and on the other ranks ScheduleInputError."""
    edges: list[Edge] = []
    device = next(iter(calls.values())).stage.device
    for stage in range(placement.num_stages - 1):
        found: list[Any] = [None]
        error: Exception | None = None
        if stage in calls:
            given = args if stage == 0 else [_zeros(meta, calls[stage].stage.device) for meta in edges[-1]]
            try:
                found = [_outputs(calls[stage], given, kwargs, trains)]
            except Exception as raised:
                error, found = raised, [f"{type(raised).__name__}: {raised}"]
        rank = placement.homes[stage][0]
        if placement.pipeline_size > 1:
            _share(found, rank, group, device)
        if error is not None:
            raise error
        if isinstance(found[0], str):
            raise ScheduleInputError(f"stage {stage}, on pipeline rank {rank}, failed in its first forward: {found[0]}")
        edges.append(found[0])
    return edges


def agree_to_begin(problem: Exception | None, size: int, group: Any, device: Any) -> None:
    """Called by all ranks together: raises ``problem``, what this rank's input is refused for; ScheduleInputError where
    it is another's that is refused."""
    refused: list[Any] = [None] * size
    for rank in range(size if size > 1 else 0):
        said = [None if problem is None else f"{type(problem).__name__}: {problem}"]
        _share(said, rank, group, device)
        refused[rank] = said[0]
    if problem is not None:
        raise problem
    for rank, why in enumerate(refused):
        if why is not None:
            raise ScheduleInputError(f"pipeline rank {rank} cannot begin the step: {why}")


def _share(objects: list[Any], rank: int, group: Any, device: Any) -> None:
    """``objects`` of rank ``rank`` of the group, on all ranks."""
    where = None if dist.get_backend(group) == "gloo" else device
    dist.broadcast_object_list(objects, dist.get_global_rank(group, rank), group, where)


def _zeros(meta: TensorMeta, device: Any) -> Tensor:
    return torch.zeros(meta.shape, dtype=meta.dtype, device=device, requires_grad=meta.requires_grad)


def _outputs(call: StageCall, args: Sequence[Any], kwargs: Mapping[str, Any], trains: bool) -> Edge:
    module = call.stage.submod
    if isinstance(module, DistributedDataParallel):
        module = module.module  # without its hooks, which count forwards
    device = torch.device(call.stage.device)
    devices = [] if device.type == "cpu" else [device]
    args, kwargs = tree_map_only(Tensor, _alone, (args, kwargs))
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    forked = torch.random.fork_rng(devices, device_type=device.type)
    with forked, torch.enable_grad() if trains else nullcontext():
        outputs = call(args, kwargs, module)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for k, tensor in enumerate(outputs):
        if not isinstance(tensor, Tensor):
            raise ScheduleInputError(
                f"output {k} of stage {call.index} is a {type(tensor).__name__}; a stage gives the next one tensors"
            )
    return tuple(TensorMeta(tuple(t.shape), t.dtype, trains and t.requires_grad) for t in outputs)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without the caller's graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)

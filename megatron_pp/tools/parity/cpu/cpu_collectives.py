"""Collectives that Megatron-core calls and gloo does not have: averages, coalescing, unequal sizes. Part of
`cpu_stand_in`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.tools.parity.cpu.wrapping import wrap, wrapped


def redirect_distributed() -> None:
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    for name in ("init_process_group", "new_group"):
        redirected = wrapped(getattr(dist, name), _gloo_for_nccl)
        setattr(dist, name, redirected)
        setattr(c10d, name, redirected)
    wrap(dist, "barrier", _without_device)
    # gloo does not coalesce: the operations run one by one, and the caller gets one handle for all of them.
    c10d._coalescing_manager = dist._coalescing_manager = _one_by_one
    wrap(dist, "all_to_all_single", _listed_sizes)
    wrap(dist, "all_gather", _gathered_one_by_one)
    wrap(dist, "reduce_scatter", _scattered_one_by_one)
    summed = ("all_reduce", "reduce_scatter_tensor", "_reduce_scatter_base")
    for name in summed:
        wrap(dist, name, _average_by_hand)
    for name in (*summed, "all_gather_into_tensor", "_all_gather_base"):
        wrap(dist, name, _report_to_manager)


def _gloo_for_nccl(original: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("backend") == "nccl":
        kwargs["backend"] = "gloo"
    kwargs.pop("pg_options", None)
    kwargs.pop("device_id", None)
    return original(*["gloo" if a == "nccl" else a for a in args], **kwargs)


def _without_device(original: Any, group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """A barrier without the argument for the device. Megatron gives the device for NCCL, but gloo's barrier refuses
    it."""
    return original(group=group, async_op=async_op)


def _listed_sizes(original: Any, *args: Any, **kwargs: Any) -> Any:
    """An all-to-all with lists of sizes. Megatron's dispatcher makes lists if it copies sizes from a GPU; on the CPU it
    passes tensors."""
    for name in ("output_split_sizes", "input_split_sizes"):
        if isinstance(kwargs.get(name), torch.Tensor):
            kwargs[name] = kwargs[name].tolist()
    return original(*args, **kwargs)


def _gathered_one_by_one(
    original: Any, tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """An all-gather of unequal tensors, by broadcasts: gloo gathers only equal sizes. Megatron's calls with unequal
    tensors are synchronous."""
    if async_op or len({each.shape for each in tensor_list}) == 1:
        return original(tensor_list, tensor, group=group, async_op=async_op)
    tensor_list[dist.get_rank(group)].copy_(tensor)
    for rank, each in enumerate(tensor_list):
        dist.broadcast(each, group=group, group_src=rank)
    return None


def _scattered_one_by_one(original: Any, output: torch.Tensor, input_list: Any, *args: Any, **kwargs: Any) -> Any:
    """A reduce-scatter of unequal tensors, by reductions: gloo scatters only equal sizes."""
    if len({each.shape for each in input_list}) == 1:
        return original(output, input_list, *args, **kwargs)
    group = kwargs.get("group")
    for rank, each in enumerate(input_list):
        dist.reduce(each, group=group, group_dst=rank)
    output.copy_(input_list[dist.get_rank(group)])
    return None


class _Collected:
    """The handles of one coalesced region; `wait` waits for all of them."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


_OPEN: list[_Collected] = []


@contextlib.contextmanager
def _one_by_one(group: Any = None, device: Any = None, async_ops: bool | None = False) -> Iterator[_Collected]:
    collected = _Collected()
    _OPEN.append(collected)
    try:
        yield collected
    finally:
        _OPEN.pop()
    if not async_ops:
        collected.wait()


def _report_to_manager(original: Any, *args: Any, **kwargs: Any) -> Any:
    work = original(*args, **kwargs)
    if _OPEN and work is not None:
        _OPEN[-1].works.append(work)
        return None
    return work


def _average_by_hand(original: Any, *args: Any, **kwargs: Any) -> Any:
    """An average as a sum and a division, because gloo has no ReduceOp.AVG. Megatron needs only the synchronous
    form."""
    if kwargs.get("op") != dist.ReduceOp.AVG:
        return original(*args, **kwargs)
    if kwargs.get("async_op"):
        raise NotImplementedError(f"{original.__name__} with ReduceOp.AVG and async_op=True on gloo")
    kwargs["op"] = dist.ReduceOp.SUM
    original(*args, **kwargs)
    args[0].div_(dist.get_world_size(kwargs.get("group")))
    return None

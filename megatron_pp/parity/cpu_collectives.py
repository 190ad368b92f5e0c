"""Collectives that gloo lacks and Megatron-core calls: averages, coalescing, unequal sizes. Part of `cpu_stand_in`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def redirect_distributed() -> None:
    _gloo_for_nccl("init_process_group")
    _gloo_for_nccl("new_group")
    # Megatron names the device so that NCCL need not guess it; gloo's barrier refuses the argument.
    plain_barrier = dist.barrier

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return plain_barrier(group=group, async_op=async_op)

    dist.barrier = barrier  # type: ignore[assignment]
    # gloo does not coalesce: run the operations one by one and hand out one handle for all of them.
    import torch.distributed.distributed_c10d as c10d

    c10d._coalescing_manager = _one_by_one
    dist._coalescing_manager = _one_by_one
    _listed_sizes()
    _one_rank_at_a_time()
    for name in ("all_reduce", "reduce_scatter_tensor", "_reduce_scatter_base"):
        _average_by_hand(name)
    for name in (
        "all_reduce",
        "reduce_scatter_tensor",
        "_reduce_scatter_base",
        "all_gather_into_tensor",
        "_all_gather_base",
    ):
        _report_to_manager(name)


def _listed_sizes() -> None:
    """Megatron's dispatcher makes lists of the sizes where it copies them from a GPU, else leaves tensors."""
    original = dist.all_to_all_single

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return original(*args, **kwargs)

    dist.all_to_all_single = wrapped


def _one_rank_at_a_time() -> None:
    """gloo gathers and scatters tensors of one size only. Megatron waits for both where it gives unequal ones."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or len({each.shape for each in tensor_list}) == 1:
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        tensor_list[dist.get_rank(group)].copy_(tensor)
        for rank, each in enumerate(tensor_list):
            dist.broadcast(each, group=group, group_src=rank)
        return None

    def reduce_scatter(output: torch.Tensor, input_list: Any, *args: Any, **kwargs: Any) -> Any:
        if len({each.shape for each in input_list}) == 1:
            return scatter(output, input_list, *args, **kwargs)
        group = kwargs.get("group")
        for rank, each in enumerate(input_list):
            dist.reduce(each, group=group, group_dst=rank)
        output.copy_(input_list[dist.get_rank(group)])
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _gloo_for_nccl(name: str) -> None:
    original = getattr(dist, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        kwargs.pop("pg_options", None)
        kwargs.pop("device_id", None)
        return original(*["gloo" if a == "nccl" else a for a in args], **kwargs)

    setattr(dist, name, wrapped)
    setattr(sys.modules["torch.distributed.distributed_c10d"], name, wrapped)


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


def _report_to_manager(name: str) -> None:
    original = getattr(dist, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        work = original(*args, **kwargs)
        if _OPEN and work is not None:
            _OPEN[-1].works.append(work)
            return None
        return work

    setattr(dist, name, wrapped)


def _average_by_hand(name: str) -> None:
    """gloo has no ReduceOp.AVG: sum, then divide. Only the synchronous form is needed by Megatron."""
    original = getattr(dist, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("op") != dist.ReduceOp.AVG:
            return original(*args, **kwargs)
        if kwargs.get("async_op"):
            raise NotImplementedError(f"{name} with ReduceOp.AVG and async_op=True on gloo")
        kwargs["op"] = dist.ReduceOp.SUM
        original(*args, **kwargs)
        args[0].div_(dist.get_world_size(kwargs.get("group")))
        return None

    setattr(dist, name, wrapped)

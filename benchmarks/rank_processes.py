"""Ranks as processes. They are forked from a process that has imported torch and the peers, which takes 10 s."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.shaped_network import Place, shaped_network


def run_ranks(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], peers: bool = False, **options: Any
) -> list[Any]:
    """Run ``function(rank, size, *args)`` on every rank, by `testkit.processes.run_processes` and with its options.
    ``peers``: import Megatron-core and the checkout before the ranks are forked."""
    from testkit.processes import run_processes

    multiprocessing.set_forkserver_preload(["benchmarks.engine_ours", *(["benchmarks.preloaded"] if peers else [])])
    return run_processes(function, size, args, start_method="forkserver", **options)


def run_on_shaped_network(
    function: Callable[..., Any],
    size: int,
    args: tuple[Any, ...],
    rate_mbit: float,
    timeout: float,
    peers: bool = False,
) -> list[Any]:
    """Run ``function(rank, size, *args)`` on every rank, with gloo over links of ``rate_mbit``. Results are by rank."""
    with tempfile.TemporaryDirectory() as folder, shaped_network(size, rate_mbit) as places:
        store = os.path.join(folder, "store")
        return run_ranks(_placed, size, (places, store, function, args), backend=None, peers=peers, timeout=timeout)


def _placed(
    rank: int, size: int, places: list[Place], store: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    places[rank].enter()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    try:
        return function(rank, size, *args)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def transfer_seconds(rank: int, num_bytes: int, repeats: int = 5) -> float:
    """The least seconds of a message of ``num_bytes`` from rank 0 to rank 1 on the idle link. All ranks call this."""
    tensor = torch.zeros(num_bytes // 4)
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
        best = min(best, time.perf_counter() - began)
    shared = [None]
    if rank == 1:
        shared = [best]
    dist.broadcast_object_list(shared, src=1)
    return float(shared[0])  # type: ignore[arg-type]

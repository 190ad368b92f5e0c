"""The transfer rate of each pair of GPUs, by CUDA events. On one GPU, a link of a chosen rate between two ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import BenchmarkError
from gpu_day import outside
from gpu_day.bench import Bench
from gpu_day.ranks import synchronize

REPEATS = 5
NVLINK_GB_PER_SECOND = 30.0  # PCIe 4.0 x16 moves 25
RATE_MBIT = 4000.0
SHAPED = (0.5, 1.1)  # share of the chosen rate that a message of some megabytes should reach


def pairs(bench: Bench) -> None:
    """Measure every pair of GPUs, one way and both ways at once."""
    size = bench.machine.gpus
    num_bytes = int(bench.sizes.megabytes * 2**20)
    found = bench.ranks(_exchange, num_bytes, size=size)
    topology = outside.nvidia_smi("topo", "-m")
    rows = []
    for one, other in _pairs(size):
        arrived, one_way, both_ways = (max(found[rank][one, other][k] for rank in (one, other)) for k in range(3))
        link = _link(topology, one, other)
        bench.check(arrived == 0.0, f"what GPU {one} and GPU {other} send each other arrives")
        peer = "yes" if bench.machine.has_gpus and outside.peer_access(one, other) else "no"
        rates = [num_bytes / seconds / 1e9 for seconds in (one_way, both_ways)]
        if link.startswith("NV"):
            bench.check(rates[0] > NVLINK_GB_PER_SECOND, f"GPU {one} to GPU {other} is as fast as NVLink")
        rows.append([f"{one}-{other}", link or "-", peer, *rates])
    bench.text(f"Messages of {bench.sizes.megabytes:g} MB, GB/s each way; links as `nvidia-smi topo -m` names them.")
    bench.table(["GPUs", "link", "peer access", "one way", "both ways"], rows)


def _pairs(size: int) -> list[tuple[int, int]]:
    return [(one, other) for one in range(size) for other in range(one + 1, size)]


def _exchange(
    rank: int, size: int, device: torch.device, num_bytes: int
) -> dict[tuple[int, int], tuple[float, float, float]]:
    """For each pair with this rank: the number of wrong elements, and the least seconds of a message one way and both
    ways."""
    dist.all_reduce(torch.zeros(1, device=device))  # all ranks make the communicator before two of them exchange
    out, into = (torch.full((num_bytes // 4,), float(value), device=device) for value in (rank, -1))
    found = {}
    for one, other in _pairs(size):
        dist.barrier()
        if rank not in (one, other):
            continue
        peer = one + other - rank
        one_way = [dist.P2POp(dist.isend, out, peer) if rank == one else dist.P2POp(dist.irecv, into, peer)]
        both_ways = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
        seconds = [_least_seconds(ops, device) for ops in (one_way, both_ways)]
        found[one, other] = (float((into != peer).sum()), *seconds)
    return found


def _least_seconds(ops: list[Any], device: torch.device) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        ended = _clock(device)
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        best = min(best, ended())
    return best


def _clock(device: torch.device) -> Callable[[], float]:
    """A clock that has started. A call returns the seconds since then, on a GPU those of its stream."""
    if device.type != "cuda":
        began = time.perf_counter()
        return lambda: time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()

    def ended() -> float:
        end.record()
        torch.cuda.synchronize(device)
        return max(1e-9, start.elapsed_time(end) / 1e3)

    return ended


def _link(topology: str, one: int, other: int) -> str:
    """The entry of two GPUs in the table of ``nvidia-smi topo -m``, such as NV18, PIX, SYS; "" if there is none."""
    match = re.search(rf"^GPU{one}\s+(.*)$", topology, re.MULTILINE)
    cells = match[1].split() if match else []
    return cells[other] if other < len(cells) else ""


# -- one GPU -----------------------------------------------------------------------------------------------------------


def shaped(bench: Bench) -> None:
    """Measure a link of a chosen rate between two ranks on one GPU. Such a link shows what NVLink hides."""
    num_bytes = int(bench.sizes.megabytes * 2**20)
    try:
        with outside.links_of(2, RATE_MBIT) as places:
            found = bench.ranks(_in_namespace, places, num_bytes)
        rate = RATE_MBIT / 8e3
        what = f"a link shaped to {RATE_MBIT / 8e3:g} GB/s"
    except BenchmarkError as reason:
        bench.text(f"Links cannot be shaped here ({reason}), so the ranks use unshaped sockets of the loopback.")
        found = bench.ranks(_one_message, num_bytes)
        rate = 0.0
        what = "the loopback's sockets"
    wrong, seconds = (max(one[k] for one in found) for k in range(2))
    measured = num_bytes / seconds / 1e9
    bench.check(wrong == 0.0, "what two ranks on one GPU send arrives")
    if rate:
        bench.check(SHAPED[0] * rate <= measured <= SHAPED[1] * rate, f"a link of {rate:g} GB/s moves about as much")
    bench.text(f"Two ranks on one GPU, {bench.sizes.megabytes:g} MB over {what}: {measured:.3g} GB/s.")
    bench.numbers(gb_per_second=measured)


def _in_namespace(rank: int, size: int, device: torch.device, places: list[Any], num_bytes: int) -> list[float]:
    """``_one_message`` in the rank's network namespace. The group is new, so its connections are made there."""
    places[rank].enter()
    os.environ["NCCL_SOCKET_IFNAME"] = places[rank].interface
    return _one_message(rank, size, device, num_bytes)


def _one_message(rank: int, size: int, device: torch.device, num_bytes: int) -> list[float]:
    """The number of elements that arrive wrong, and the least seconds of a message from rank 0 to rank 1."""
    group = dist.new_group(list(range(size)))
    tensor = torch.full((num_bytes // 4,), 1.0 - rank, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        dist.barrier(group=group)
        synchronize(device)
        began = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1, group=group)
        else:
            dist.recv(tensor, 0, group=group)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return [float((tensor != 1.0).sum()), best if rank else 0.0]

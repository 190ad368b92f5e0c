"""Memory of each process as NVML reports it, and the devices on which each process has a CUDA context."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from gpu_day import outside, ranks
from gpu_day.bench import Bench, NotRun
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.pipeline import run_rank

_QUERY = ("--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits")
WATCHED_SECONDS = 1.0  # long enough for the threads of the guard and of tracing to query their events


def run(bench: Bench) -> None:
    if not bench.machine.has_gpus:
        raise NotRun("there is no CUDA context without a GPU")
    size = min(8, max(2, bench.machine.gpus))
    found = bench.ranks(_rank, size=size)
    expected = [[int(device.partition(":")[2])] for device in bench.devices(size)]
    counted = [one["contexts"] for one in found]
    bench.check(counted == expected, f"each of {size} ranks has one context, on its own GPU: {counted}")
    used = _memory(found[0]["nvml"])
    places = Counter(pid for pid, _, _ in used)
    if any(one["pid"] in places for one in found):
        alone = all(places[one["pid"]] == 1 for one in found)
        bench.check(alone, "NVML has each rank's process on one GPU")
    else:
        bench.text("nvidia-smi names none of the ranks: they have other process ids outside of this container.")
    by_pid = {pid: mib for pid, _, mib in used}
    rows = [[rank, by_pid.get(one["pid"], "-"), one["allocated"], one["reserved"]] for rank, one in enumerate(found)]
    bench.text("A rank's process after a step with channels; NVML less reserved is the context, NCCL and libraries.")
    bench.table(["rank", "NVML MiB", "allocated MiB", "reserved MiB"], rows)


def _memory(listed: str) -> list[tuple[int, str, float]]:
    """(process, GPU, MiB) of each line of nvidia-smi's output."""
    found = []
    for line in listed.splitlines():
        pid, gpu, mib = (cell.strip() for cell in line.split(","))
        found.append((int(pid), gpu, float(mib) if mib.isdigit() else 0.0))
    return found


def _rank(rank: int, size: int, device: torch.device) -> dict[str, Any]:
    step = ranks.Step("interleaved_1f1b", 2, 2 * size, ranks.OVERLAP)
    config = step.config()
    data = step.data(device)
    communicator = P2PCommunicator(dist.group.WORLD, config)
    run_rank(rank, size, step.chunks, data, config, communicator, block=step.block(device))
    time.sleep(WATCHED_SECONDS)
    torch.cuda.synchronize(device)
    dist.barrier()
    found = {
        "pid": os.getpid(),
        "contexts": outside.contexts(),
        "nvml": outside.nvidia_smi(*_QUERY) if rank == 0 else "",
        "allocated": torch.cuda.memory_allocated(device) / 2**20,
        "reserved": torch.cuda.memory_reserved(device) / 2**20,
    }
    dist.barrier()  # no rank ends before the query
    communicator.transport.close()
    return found

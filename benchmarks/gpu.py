"""Steps of two ranks on one GPU over sockets: step time by CUDA events, and how long the host and the stream wait.

NCCL refuses two ranks on one GPU only within one host id. So each rank has its own host id, and messages go over
sockets. Sockets are slow enough to show what overlap hides. With two GPUs or more each rank has its own GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from typing import Any

import torch

from benchmarks.engines import available_steps, surroundings
from benchmarks.megatron_library import versions
from benchmarks.report import NoDeviceError, Report, Row, add_options
from benchmarks.stages import BusyStage
from benchmarks.work import Work

HELP = "the engines on a GPU, two ranks sharing it over sockets; step time by CUDA events"
QUICK = {"mib": [8.0], "rounds": 3}
_WARM_UP = 2  # rounds: the first loads kernels, and an engine may change its plan after it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    compute = 10.0, "milliseconds of one chunk's forward; a backward takes twice as long"
    add_options(parser, mib=([1.0, 8.0, 32.0], "sizes of an activation"), forward_ms=compute, microbatches=8)
    add_options(parser, rounds=5, timeout=300.0)


def run(args: argparse.Namespace) -> Report:
    if not torch.cuda.is_available():
        raise NoDeviceError("there is no GPU here; the other subcommands run on the CPU")
    from testkit.processes import run_processes

    works = [
        Work(schedule, 2, chunks, args.microbatches, (max(1, round(mib * 256)), 1, 1024))
        for schedule, chunks in (("1f1b", 1), ("eager_1f1b", 1), ("interleaved_1f1b", 2))
        for mib in args.mib
    ]
    with tempfile.TemporaryDirectory() as folder:
        given = (works, args.forward_ms / 1e3, args.rounds, os.path.join(folder, "store"))
        per_rank = run_processes(_rank, 2, given, backend=None, timeout=args.timeout)
    rows: list[Row] = []
    for place, work in enumerate(works):
        for engine in per_rank[0][place]:
            steps = [max(pair) for pair in zip(*(rank[place][engine]["ms"] for rank in per_rank), strict=True)]
            rows.append(
                {
                    "setting": work.label(),
                    "MiB": work.message_bytes / 2**20,
                    "engine": engine,
                    "ms (min)": min(steps),
                    "ms (median)": statistics.median(steps),
                    "peak MiB rank 0": per_rank[0][place][engine]["peak"] / 2**20,
                    "peak MiB rank 1": per_rank[1][place][engine]["peak"] / 2**20,
                }
            )
    return Report(
        "gpu",
        "Step time on a GPU, two ranks",
        rows,
        versions()
        | {"gpu": torch.cuda.get_device_name(0), "forward ms": args.forward_ms, "microbatches": args.microbatches},
        ["Compute is a kernel that spins for a known time. Two ranks on one GPU take turns on it."],
    )


def _rank(
    rank: int, size: int, works: list[Work], forward: float, rounds: int, store: str
) -> list[dict[str, dict[str, Any]]]:
    """For each work and engine: the milliseconds of each round, and the peak of allocated bytes."""
    import torch.distributed as dist

    device = rank % torch.cuda.device_count()
    if torch.cuda.device_count() < size:  # the ranks share a GPU
        os.environ.update({"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"})
    torch.cuda.set_device(device)
    torch.set_default_device(torch.device("cuda", device))
    dist.init_process_group("nccl", store=dist.FileStore(store, size), rank=rank, world_size=size)
    results = [measured_steps(rank, work, forward, rounds) for work in works]
    dist.destroy_process_group()
    return results


def measured_steps(rank: int, work: Work, forward: float, rounds: int) -> dict[str, dict[str, Any]]:
    """For each engine, "ms" of each round by CUDA events, and "peak", the peak of allocated bytes. ``forward``:
    seconds. Needs a process group and a default device."""
    import torch.distributed as dist

    steps, _ = available_steps(work, rank, dist.group.WORLD, lambda stage: BusyStage(forward, 2 * forward))
    found: dict[str, dict[str, Any]] = {engine: {"ms": [], "peak": 0} for engine in steps}
    for number in range(_WARM_UP + rounds):
        for engine, step in steps.items():
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.reset_peak_memory_stats()
            with surroundings(engine):
                milliseconds = _event_milliseconds(step)
            if number >= _WARM_UP:
                found[engine]["ms"].append(milliseconds)
                found[engine]["peak"] = max(found[engine]["peak"], torch.cuda.max_memory_allocated())
    return found


def _event_milliseconds(step: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))

"""Two ranks on one GPU over sockets: step time by CUDA events, and how long the host and the stream wait.

NCCL refuses two ranks on one GPU only within one host id, so each rank has its own, and their messages go over
sockets: slow enough that what overlap hides can be seen. With two GPUs or more each rank has one of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from typing import Any

import torch

from benchmarks.engines import Work, available_steps, surroundings
from benchmarks.megatron_library import versions
from benchmarks.report import NoDeviceError, Report, Row

HELP = "the engines on a GPU, two ranks sharing it over sockets; step time by CUDA events"
QUICK = {"mib": [8.0], "rounds": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=float, nargs="+", default=[1.0, 8.0, 32.0], help="sizes of an activation")
    parser.add_argument("--forward-ms", type=float, default=10.0, help="of one chunk; a backward takes twice as long")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300.0)


def run(args: argparse.Namespace) -> Report:
    if not torch.cuda.is_available():
        raise NoDeviceError("there is no GPU here; the other subcommands run on the CPU")
    from tests.harness.processes import run_processes

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
        ["setting", "MiB", "engine", "ms (min)", "ms (median)", "peak MiB rank 0", "peak MiB rank 1"],
        rows,
        versions()
        | {"gpu": torch.cuda.get_device_name(0), "forward ms": args.forward_ms, "microbatches": args.microbatches},
        ["Compute is a kernel that spins for a known time. Two ranks on one GPU take turns on it."],
    )


class _Spin(torch.autograd.Function):
    """A forward and a backward that keep the stream busy for a number of clock cycles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, cycles: tuple[int, int]) -> torch.Tensor:
        ctx.cycles = cycles[1]
        torch.cuda._sleep(cycles[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        given = grads[0].clone()
        return given, given.new_zeros(1), None


class SpinStage(torch.nn.Module):
    """A stage whose compute takes a known time on the GPU."""

    def __init__(self, cycles: tuple[int, int]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.cycles = cycles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Spin.apply(x, self.weight, self.cycles)
        return output


def _rank(
    rank: int, size: int, works: list[Work], forward: float, rounds: int, store: str
) -> list[dict[str, dict[str, Any]]]:
    """For each work and engine: milliseconds of each round, and the most bytes allocated."""
    import torch.distributed as dist

    device = rank % torch.cuda.device_count()
    if torch.cuda.device_count() < size:  # they share one
        os.environ.update({"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"})
    torch.cuda.set_device(device)
    torch.set_default_device(torch.device("cuda", device))
    dist.init_process_group("nccl", store=dist.FileStore(store, size), rank=rank, world_size=size)
    per_second = _cycles_per_second()
    cycles = (int(forward * per_second), int(2 * forward * per_second))
    results = [_measured(rank, work, cycles, rounds) for work in works]
    dist.destroy_process_group()
    return results


def _measured(rank: int, work: Work, cycles: tuple[int, int], rounds: int) -> dict[str, dict[str, Any]]:
    import torch.distributed as dist

    steps, _ = available_steps(work, rank, dist.group.WORLD, lambda stage: SpinStage(cycles))
    found: dict[str, dict[str, Any]] = {engine: {"ms": [], "peak": 0} for engine in steps}
    for number in range(rounds + 1):
        for engine, step in steps.items():
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.reset_peak_memory_stats()
            with surroundings(engine):
                milliseconds = _event_milliseconds(step)
            if number:  # the first is for warming up
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


def _cycles_per_second() -> float:
    cycles = 100_000_000
    torch.cuda._sleep(cycles)
    return 1e3 * cycles / _event_milliseconds(lambda: torch.cuda._sleep(cycles))

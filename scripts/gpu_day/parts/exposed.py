"""The exposed communication of a step, measured by CUDA events, under this engine, Megatron's and torch's."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import measured_steps
from benchmarks.overlap import Setting, seconds_without_transfers
from benchmarks.sweep import Sweep, bound_seconds
from benchmarks.work import Work
from gpu_day.bench import Bench
from gpu_day.ranks import transfer_seconds
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.testing.toy import toy_config

SCHEDULES = {"1f1b": 1, "eager_1f1b": 1, "interleaved_1f1b": 2}  # schedule -> chunks of a rank
MICROBATCHES = 8
OURS = "ours"
OVER_BOUND, OVER_PEER = 1.05, 1.03  # our limits, for transfers up to the length of a forward


def run(bench: Bench) -> None:
    size = 4 if bench.machine.gpus >= 4 and not bench.one_gpu else 2
    forward = bench.sizes.forward_ms / (4e3 if bench.shares else 2e3)  # two ranks that share a GPU take turns
    sweep = Sweep(forward, 2 * forward, 0.0, bench.sizes.rounds)
    works = [
        Work(schedule, size, chunks, MICROBATCHES, (max(1, round(mib * 256)), 1, 1024))
        for schedule, chunks in SCHEDULES.items()
        for mib in (bench.sizes.megabytes / 8, bench.sizes.megabytes / 2)
    ]
    found = bench.ranks(_rank, works, sweep, size=size)
    rows: list[list[Any]] = []
    engines: set[str] = set()
    for place, work in enumerate(works):
        rows += _rows(bench, work, sweep, [one[place] for one in found])
        engines |= found[0][place]["steps"].keys()
    peers = sorted(engines - {OURS})
    bench.text(
        f"P={size}, M={MICROBATCHES}, a forward spins for {1e3 * sweep.forward:g} ms, a backward for twice that. "
        "Exposed: beyond the simulated step whose transfers take no time; over bound: beyond one whose transfers are "
        f"overlapped as far as the order of compute allows. Beside ours: {', '.join(peers) or 'no engine installed'}."
    )
    if bench.shares:
        bench.text("Two ranks take turns on one GPU here. The bound does not include that, so there is no verdict.")
    bench.table(["setting", "MiB", "transfer / F", "engine", "ms", "exposed ms", "over bound", "peak MiB"], rows)


def _rows(bench: Bench, work: Work, sweep: Sweep, per_rank: list[dict[str, Any]]) -> list[list[Any]]:
    transfer = max(one["transfer"] for one in per_rank)
    bound, ideal = bound_seconds(work, sweep, transfer), seconds_without_transfers(Setting(work, sweep))
    rows, medians = [], {}
    for engine in per_rank[0]["steps"]:
        of_ranks = [one["steps"][engine] for one in per_rank]
        medians[engine] = ms = statistics.median(map(max, zip(*(one["ms"] for one in of_ranks), strict=True)))
        peak = max(one["peak"] for one in of_ranks) / 2**20
        times = [ms, ms - 1e3 * ideal, ms / (1e3 * bound)]
        rows.append([work.label(), work.message_bytes / 2**20, transfer / sweep.forward, engine, *times, peak])
    if not bench.shares and transfer <= sweep.forward:
        what = f"{work.label()}, {work.message_bytes / 2**20:g} MiB"
        over = medians[OURS] / (1e3 * bound)
        bench.check(over <= OVER_BOUND, f"{what}: at most {OVER_BOUND} of the bound ({over:.3f})")
        best = min((ms for engine, ms in medians.items() if engine != OURS), default=float("inf"))
        bench.check(medians[OURS] <= OVER_PEER * best, f"{what}: at most {OVER_PEER} of the best peer's step")
    return rows


def _rank(rank: int, size: int, device: torch.device, works: list[Work], sweep: Sweep) -> list[dict[str, Any]]:
    """For each work: the seconds of one transfer, and for each engine the milliseconds of its steps and the peak
    bytes."""
    torch.set_default_device(device)
    found = []
    communicator = P2PCommunicator(dist.group.WORLD, toy_config())
    for work in works:
        transfer = transfer_seconds(communicator, work.shape, device)
        found.append({"transfer": transfer, "steps": measured_steps(rank, work, sweep.forward, sweep.rounds)})
    communicator.transport.close()
    return found

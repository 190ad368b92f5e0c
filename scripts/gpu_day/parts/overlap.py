"""What safety costs: steps freed at once, waited at once and as ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overlap import FREE_AT_ONCE, OURS, VARIANTS, Setting, VariantStep
from benchmarks.rounds import slowest_rank, timed_rounds
from benchmarks.stages import BusyStage, CopyingBusyStage
from benchmarks.sweep import Sweep
from benchmarks.work import Work
from gpu_day import outside
from gpu_day.bench import Bench
from gpu_day.ranks import synchronize, transfer_seconds

MICROBATCHES = 8
COST = 1.05  # of the unsafe floor; 1.03 is wanted, and timings differ by a percent
SHARED_COST = 1.25  # where two ranks take turns on a GPU, or on the cores of a CPU
TRIES_ON_CPU = 5  # its cores may be busy with other things meanwhile


def run(bench: Bench) -> None:
    sizes, megabytes = bench.sizes, bench.sizes.megabytes / 4
    forward_ms = (0.5 if bench.shares else 1.0) * sizes.forward_ms  # two ranks that share a GPU take turns
    limit = SHARED_COST if bench.shares or not bench.machine.has_gpus else COST
    for _ in range(1 if bench.machine.has_gpus else TRIES_ON_CPU):
        found = bench.ranks(_rank, megabytes, forward_ms, sizes.rounds)
        seconds = slowest_rank([one["seconds"] for one in found])
        medians = {name: 1e3 * statistics.median(all_of_it) for name, all_of_it in seconds.items()}
        ratio = medians[OURS] / medians[FREE_AT_ONCE]
        if ratio <= limit or bench.left < 10.0:
            break
    bench.check(ratio <= limit, f"a step takes at most {limit} of one that frees without waiting ({ratio:.3f})")
    transfer = 1e3 * max(one["transfer"] for one in found)
    bench.text(
        f"Interleaved 1F1B, P=2, V=2, M={MICROBATCHES}, forward {forward_ms:g} ms, backward {2 * forward_ms:g} ms, "
        f"{megabytes:g} MB, one transfer {transfer:.3g} ms."
    )
    peaks = {name: max(one["peak MiB"].get(name, 0.0) for one in found) for name in VARIANTS}
    rows = [[name, 1e3 * min(seconds[name]), medians[name], peaks[name]] for name in VARIANTS]
    bench.table(["variant", "ms (min)", "ms (median)", "peak MiB"], rows)


def _rank(
    rank: int, size: int, device: torch.device, megabytes: float, forward_ms: float, rounds: int
) -> dict[str, Any]:
    """Seconds of each variant's steps, and of one transfer; on a GPU, the most MiB."""
    work = Work("interleaved_1f1b", size, 2, MICROBATCHES, (max(1, int(megabytes * 256)), 1, 1024))
    setting = Setting(work, Sweep(forward_ms / 1e3, 2 * forward_ms / 1e3, 0.0, rounds))
    stages = (BusyStage, CopyingBusyStage) if device.type == "cuda" else ()
    made = {name: VariantStep(name, setting, rank, dist.group.WORLD, None, stages) for name in VARIANTS}  # type: ignore[arg-type]
    timed = {name: _to_the_end(step, device) for name, step in made.items()}
    transfer = transfer_seconds(made[OURS].communicator, work.shape, device)
    seconds = timed_rounds(timed, rounds, 1, dist.barrier)
    peaks = {name: outside.peak_mib(device, step) for name, step in timed.items()} if device.type == "cuda" else {}
    return {"seconds": seconds, "transfer": transfer, "peak MiB": peaks}


def _to_the_end(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    def whole() -> None:
        step()
        synchronize(device)

    return whole

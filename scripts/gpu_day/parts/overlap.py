"""The cost of safe releases: steps that free without waiting, steps that wait at once, our steps, and the simulator's
predictions."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overlap import (
    FREE_AT_ONCE,
    OURS,
    VARIANTS,
    WAIT_AT_ONCE,
    Setting,
    VariantStep,
    wait_at_once,
)
from benchmarks.rounds import slowest_rank, timed_rounds
from benchmarks.stages import BusyStage, CopyingBusyStage
from benchmarks.sweep import Sweep, network_of
from benchmarks.work import Work
from gpu_day import outside, ranks
from gpu_day.bench import Bench, NotRun
from gpu_day.ranks import synchronize, transfer_seconds
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.simulate.simulator import simulate

MICROBATCHES = 8
COST = 1.05  # limit relative to steps that free without waiting; 1.03 is the aim, and timings vary by a percent
SHARED_COST = 1.25  # the limit if two ranks take turns on a GPU, or on the cores of a CPU
TRIES_ON_CPU = 5  # its cores may be busy with other programs


def under_mps(bench: Bench) -> None:
    """Run this part with two processes that share one GPU by MPS: their kernels run at the same time, not in turns."""
    if not bench.machine.has_gpus:
        raise NotRun("there is no GPU to share")
    try:
        with outside.mps() as environment:
            found = ranks.outcome(lambda: bench.ranks(_answers, size=2, environment=environment, seconds=30.0))
            if found != "yes":
                raise NotRun(f"MPS starts, but its clients do not: {found}")
            run(bench, environment)
    except RuntimeError as error:
        raise NotRun(str(error)) from None


def _answers(rank: int, size: int, device: torch.device) -> str:
    return "yes" if float(torch.ones(1, device=device)) == 1.0 else "no"


def run(bench: Bench, environment: dict[str, str] | None = None) -> None:
    sizes = bench.sizes
    megabytes = bench.sizes.megabytes / 4
    forward_ms = (0.5 if bench.shares else 1.0) * sizes.forward_ms  # two ranks that share a GPU take turns
    limit = SHARED_COST if bench.shares or not bench.machine.has_gpus else COST
    for _ in range(1 if bench.machine.has_gpus else TRIES_ON_CPU):
        found = bench.ranks(_rank, megabytes, forward_ms, sizes.rounds, environment=environment)
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
    simulated = _simulated(_setting(2, megabytes, forward_ms, sizes.rounds), transfer / 1e3)
    rows = [[name, 1e3 * min(seconds[name]), medians[name], simulated[name], peaks[name]] for name in VARIANTS]
    bench.table(["variant", "ms (min)", "ms (median)", "simulated ms", "peak MiB"], rows)
    if bench.shares and environment is None:
        bench.text("Two ranks take turns on one GPU here. The simulation does not include that.")


def _rank(
    rank: int, size: int, device: torch.device, megabytes: float, forward_ms: float, rounds: int
) -> dict[str, Any]:
    """The seconds of each variant's steps and of one transfer, and on a GPU the peak MiB."""
    setting = _setting(size, megabytes, forward_ms, rounds)
    work = setting.work
    stages = (BusyStage, CopyingBusyStage) if device.type == "cuda" else ()
    made = {name: VariantStep(name, setting, rank, dist.group.WORLD, None, stages) for name in VARIANTS}  # type: ignore[arg-type]
    timed = {name: _to_the_end(step, device) for name, step in made.items()}
    transfer = transfer_seconds(made[OURS].communicator, work.shape, device)
    seconds = timed_rounds(timed, rounds, 1, dist.barrier)
    peaks = {name: outside.peak_mib(device, step) for name, step in timed.items()} if device.type == "cuda" else {}
    return {"seconds": seconds, "transfer": transfer, "peak MiB": peaks}


def _setting(size: int, megabytes: float, forward_ms: float, rounds: int) -> Setting:
    work = Work("interleaved_1f1b", size, 2, MICROBATCHES, (max(1, int(megabytes * 256)), 1, 1024))
    return Setting(work, Sweep(forward_ms / 1e3, 2 * forward_ms / 1e3, 0.0, rounds))


def _simulated(setting: Setting, transfer: float) -> dict[str, float]:
    """The simulated milliseconds of each variant's step, if each rank has its own GPU. The variant that frees at once
    copies within its compute and never waits, so it takes as long as ours."""
    plan = build_plan(setting.work.spec())
    costs = setting.sweep.costs(setting.work)
    network = network_of(setting.work, transfer)
    ours, at_once = (1e3 * simulate(one, costs, network).makespan for one in (plan, wait_at_once(plan)))
    return {FREE_AT_ONCE: ours, WAIT_AT_ONCE: at_once, OURS: ours}


def _to_the_end(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    def whole() -> None:
        step()
        synchronize(device)

    return whole

"""Checks that the release of an output does not stall the compute stream. The control waits at once, and must stall
it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.stages import cycles_per_ms
from gpu_day.bench import Bench, NotRun
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.executor import PlanExecutor, Shapes
from megatron_pp.runtime.engine.gradient_hooks import SyncHooks

_SPAN, _LONGEST = "first to last forward, stream ms", "longest release, stream ms"


def run(bench: Bench) -> None:
    if not bench.machine.has_gpus:
        raise NotRun("there is no CUDA stream without a GPU")
    sizes = bench.sizes
    found = bench.ranks(_rank, int(sizes.megabytes * 2**20), sizes.forward_ms, sizes.late)[0]
    ours, control = found["ours"], found["wait at once"]
    busy, late = 4 * sizes.forward_ms, 1e3 * sizes.late
    free = ours[_SPAN] < busy + 0.2 * late and ours[_LONGEST] < 0.1 * late
    bench.check(free, "a release does not stall the compute stream")
    bench.check(control[_SPAN] > 0.5 * late, "the control stalls the compute stream")
    bench.text(f"Four forwards of {sizes.forward_ms:g} ms, the receiver {late:g} ms late.")
    bench.table(["", *ours], [[name, *found[name].values()] for name in ("ours", "wait at once")])


class SleepSteps:
    """Forwards that keep the GPU's compute stream busy."""

    def __init__(self, device: torch.device, shape: tuple[int, ...], forward_ms: float) -> None:
        self.cycles = cycles_per_ms(device) * forward_ms
        self.first = torch.ones(shape, device=device)

    def forward(self, chunk: int, mb: int, input_tensor: Any) -> torch.Tensor:
        torch.cuda._sleep(int(self.cycles))
        return (self.first if input_tensor is None else input_tensor) * 1.0


class WaitsAtOnce(PlanExecutor):
    """The control, which waits for every output's send as soon as it is posted."""

    def _send_f(self, at: Task) -> None:
        super()._send_f(at)
        self.handles[at.message].wait()


class StreamClock:
    """An observer that records events on the compute stream before the first and after the last forward, and around
    FREE_F."""

    def __init__(self, last_forward: int) -> None:
        self.last_forward = last_forward
        self.first, self.last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.releases: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.host = 0.0
        self._began = 0.0

    def begin(self, at: ins.Instruction) -> None:
        if at.op == ins.FORWARD and at.mb == 0:
            self.first.record()
        if at.op == ins.FREE_F:
            self.releases.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self.releases[-1][0].record()
            self._began = time.perf_counter()

    def end(self, at: ins.Instruction) -> None:
        if at.op == ins.FORWARD and at.mb == self.last_forward:
            self.last.record()
        if at.op == ins.FREE_F:
            self.host = max(self.host, time.perf_counter() - self._began)
            self.releases[-1][1].record()


def _rank(
    rank: int, size: int, device: torch.device, num_bytes: int, forward_ms: float, late: float
) -> dict[str, dict[str, float]]:
    """Rank 0 sends four outputs to a late receiver. Returns the milliseconds on its compute stream and on its host."""
    shape = (max(1, num_bytes // 4 // 256), 1, 256)
    plan = build_plan(PlanSpec("1f1b", 2, 1, 4, forward_only=True, release_after=1))
    communicator = P2PCommunicator(dist.group.WORLD, SimpleNamespace(pipeline_dtype=torch.float32))
    found = {}
    for name, executor in (("warm-up", PlanExecutor), ("ours", PlanExecutor), ("wait at once", WaitsAtOnce)):
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)
        if rank == 1:
            time.sleep(late)
        steps = SleepSteps(device, shape, forward_ms)
        found[name] = _timed_forwards(plan, communicator, executor, steps, [Shapes(shape, shape)])
    return found


def _timed_forwards(
    plan: Plan, communicator: P2PCommunicator, executor: type[PlanExecutor], steps: SleepSteps, shapes: list[Shapes]
) -> dict[str, float]:
    clock = StreamClock(plan.spec.num_microbatches - 1)
    hooks = SyncHooks(communicator.settings, [])
    executor(plan, communicator, steps, hooks, shapes, max_pending_sends=8, observer=clock).run()  # type: ignore[arg-type]
    torch.cuda.synchronize(communicator.device)
    return {
        _SPAN: clock.first.elapsed_time(clock.last),
        _LONGEST: max((a.elapsed_time(b) for a, b in clock.releases), default=0.0),
        "longest release, host ms": 1e3 * clock.host,
    }

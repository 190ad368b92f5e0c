"""What the ranks of `gpu_check.py` do: two processes over NCCL on one GPU or two, or over gloo to try the script
itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overlap import VARIANTS, Setting, VariantStep
from benchmarks.rounds import timed_rounds
from benchmarks.stages import BusyStage, CopyingBusyStage, cycles_per_ms
from benchmarks.sweep import Sweep
from benchmarks.work import Work
from megatron_pp.comm.group_transport import group_transport
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.executor import PlanExecutor, Shapes
from megatron_pp.runtime.gradient_hooks import SyncHooks
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import TOY_SCHEDULES, ToyBlock, ToyData, reference_run, toy_config
from tests.functional_tests.race_cases import run_cases

LATE = 1.0  # seconds by which the receiver comes late in the check of the compute stream
FORWARD_MS = 20.0


@dataclass(frozen=True)
class Place:
    """Where the ranks run: ``devices[rank]``, and the file that they meet at."""

    backend: str
    devices: tuple[str, ...]
    store: str

    @property
    def shared(self) -> bool:
        return len(set(self.devices)) < len(self.devices)


def enter(rank: int, size: int, place: Place, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Join the process group and run ``work(rank, size, device, *args)``.

    NCCL refuses two ranks on one GPU only within one host: each claims a host of its own.
    """
    device = torch.device(place.devices[rank])
    if place.backend == "nccl":
        if place.shared:
            os.environ["NCCL_HOSTID"] = f"megatron-pp-{rank}"
        torch.cuda.set_device(device)
    store = dist.FileStore(place.store, size)
    dist.init_process_group(place.backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        return work(rank, size, device, *args)
    finally:
        dist.destroy_process_group()


def facts(rank: int, size: int, device: torch.device) -> dict[str, str]:
    """What the numbers depend on; after one transfer, which shows that the ranks can talk at all."""
    total = torch.full((4,), float(rank), device=device)
    dist.all_reduce(total)
    found = {"torch": torch.__version__, "ranks": str(size), "sum of ranks": str(total[0].item())}
    if device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(device)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["CUDA"] = str(torch.version.cuda)
    return found


def race(rank: int, size: int, device: torch.device, repeats: int, num_bytes: int) -> dict[str, list[float]]:
    return run_cases(rank, size, {"float32": repeats, "bfloat16": repeats}, (str(device),) * size, num_bytes)


@dataclass(frozen=True)
class DeviceData(ToyData):
    """Toy data on a device."""

    device: str = "cpu"

    def microbatch(self, mb: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, target = super().microbatch(mb)
        return x.to(self.device), target.to(self.device)


def steps(rank: int, size: int, device: torch.device, p2p_debug: bool) -> dict[str, float]:
    """One training step of every schedule and policy; the difference of this rank's gradients from one process's."""
    differences = {}
    # One for all: an NCCL communicator for each channel is made once, as in a program.
    assert dist.group.WORLD is not None
    transport = group_transport(dist.group.WORLD)
    for schedule, family in TOY_SCHEDULES.items():
        num_chunks = family.chunks or 2
        for policy, flags in _POLICIES.items():
            data = DeviceData(4, hidden=64, seq_length=256, device=str(device))
            config = toy_config(
                pipeline_schedule=schedule,
                hidden_size=64,
                virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
                p2p_debug=p2p_debug,
                **flags,
            )
            communicator = P2PCommunicator(dist.group.WORLD, config, transport)

            def block(stage: int) -> torch.nn.Module:
                return ToyBlock(stage, 64).to(device)

            mine = run_rank(rank, size, num_chunks, data, config, communicator, block=block)
            whole = reference_run(size * num_chunks, data, block=block)
            worst = max(float((grad - whole.grads[name]).abs().max()) for name, grad in mine.grads.items())
            differences[f"{schedule}, {policy}"] = worst if worst == worst else float("inf")
    transport.close()
    return differences


_POLICIES: dict[str, dict[str, bool]] = {
    "overlap": {"overlap_p2p_comm": True},
    "batched": {"batch_p2p_comm": True},
    "plain": {},
}


# -- does a release stall the compute stream? --------------------------------------------------------


class SleepSteps:
    """Forwards that keep the GPU's compute stream busy for FORWARD_MS each."""

    def __init__(self, device: torch.device, shape: tuple[int, ...]) -> None:
        self.cycles = cycles_per_ms(device) * FORWARD_MS
        self.first = torch.ones(shape, device=device)

    def forward(self, chunk: int, mb: int, input_tensor: Any) -> torch.Tensor:
        torch.cuda._sleep(int(self.cycles))
        return (self.first if input_tensor is None else input_tensor) * 1.0


class WaitsAtOnce(PlanExecutor):
    """The control: waits on every output's send as soon as it is posted."""

    def _send_f(self, at: Task) -> None:
        super()._send_f(at)
        self.handles[at.message].wait()


class StreamClock:
    """An observer that marks the compute stream before the first and after the last forward, and around RELEASEs."""

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
            self.releases.append(tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)))  # type: ignore[arg-type]
            self.releases[-1][0].record()
            self._began = time.perf_counter()

    def end(self, at: ins.Instruction) -> None:
        if at.op == ins.FORWARD and at.mb == self.last_forward:
            self.last.record()
        if at.op == ins.FREE_F:
            self.host = max(self.host, time.perf_counter() - self._began)
            self.releases[-1][1].record()


def release_stall(rank: int, size: int, device: torch.device, num_bytes: int) -> dict[str, dict[str, float]]:
    """Rank 0 sends four outputs to a receiver that comes a second late. Milliseconds on its compute stream and host."""
    shape = (num_bytes // 4 // 256, 1, 256)
    plan = build_plan(PlanSpec("1f1b", 2, 1, 4, forward_only=True, release_after=1))
    communicator = P2PCommunicator(dist.group.WORLD, SimpleNamespace(pipeline_dtype=torch.float32))
    found = {}
    for name, executor in (("warm-up", PlanExecutor), ("ours", PlanExecutor), ("wait at once", WaitsAtOnce)):
        torch.cuda.synchronize(device)
        dist.barrier()
        torch.cuda.synchronize(device)
        if rank == 1:
            time.sleep(LATE)
        found[name] = _timed_forwards(plan, communicator, executor, SleepSteps(device, shape), [Shapes(shape, shape)])
    return found


def _timed_forwards(
    plan: Plan, communicator: P2PCommunicator, executor: type[PlanExecutor], steps: SleepSteps, shapes: list[Shapes]
) -> dict[str, float]:
    clock = StreamClock(plan.spec.num_microbatches - 1)
    hooks = SyncHooks(communicator.settings, [])
    executor(plan, communicator, steps, hooks, shapes, max_pending_sends=8, observer=clock).run()  # type: ignore[arg-type]
    torch.cuda.synchronize(communicator.device)
    return {
        "first to last forward, stream ms": clock.first.elapsed_time(clock.last),
        "longest release, stream ms": max((a.elapsed_time(b) for a, b in clock.releases), default=0.0),
        "longest release, host ms": 1e3 * clock.host,
    }


# -- what safety costs -----------------------------------------------------------------------------


def overlap(
    rank: int, size: int, device: torch.device, num_bytes: int, forward_ms: float, rounds: int
) -> dict[str, Any]:
    """Seconds of steps freed at once, waited at once and as ours, and of one transfer."""
    work = Work("interleaved_1f1b", size, 2, 8, (num_bytes // 4096, 1, 1024))
    setting = Setting(work, Sweep(forward_ms / 1e3, 2 * forward_ms / 1e3, 0.0, rounds))
    stages = (BusyStage, CopyingBusyStage) if device.type == "cuda" else ()
    made = {name: VariantStep(name, setting, rank, dist.group.WORLD, None, stages) for name in VARIANTS}  # type: ignore[arg-type]
    timed = {name: _to_the_end(step, device) for name, step in made.items()}
    transfer = _transfer_seconds(next(iter(made.values())).communicator, work.shape, device)
    peaks = {}
    seconds = timed_rounds(timed, rounds, 1, dist.barrier)
    for name, step in timed.items():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step()
            peaks[name] = torch.cuda.max_memory_allocated(device) / 2**20
    return {"seconds": seconds, "transfer": transfer, "peak MB": peaks}


def _to_the_end(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    def whole() -> None:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return whole


def _transfer_seconds(communicator: P2PCommunicator, shape: tuple[int, ...], device: torch.device) -> float:
    best = float("inf")
    tensor = torch.ones(shape, device=device)
    for _ in range(4):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        if communicator.rank == 0:
            communicator.send_forward(tensor, is_last_stage=False)
        else:
            communicator.recv_forward(shape, is_first_stage=False)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best

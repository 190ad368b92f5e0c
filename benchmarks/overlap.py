"""The cost of safety: steps that free outputs unsafely, steps that wait right after each send, and our steps.

All three run the same plan of compute with the same communicator, in turns. They differ only in when they wait for an
output's send and free its memory:

free at once  at the send, without waiting: the unsafe lower limit. The sent bytes are a copy, which is made within the
              time of the compute, so that the result is defined
wait at once  right after the send is posted, as the merged fix of Megatron-LM#4047 does
ours          some operations later, at the latest before the output's own backward
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.memory import peak_bytes
from benchmarks.rank_processes import run_on_shaped_network, transfer_seconds
from benchmarks.report import Report, Row, add_options
from benchmarks.rounds import print_progress, slowest_rank, summary, timed_rounds
from benchmarks.stages import CopyingStage, TimedStage
from benchmarks.sweep import Sweep, bound_seconds, sweep_settings, work_of
from benchmarks.sweep import add_arguments as add_sweep_arguments
from benchmarks.work import SECONDS, Work, first_input, loss_of
from megatron_pp.comm.transport import ACT
from megatron_pp.comm.wait_handle import WaitHandle
from megatron_pp.config.settings import StepSettings
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import Link, Network
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.runtime.engine.compute import Shapes
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.engine.gradient_hooks import SyncHooks
from megatron_pp.runtime.engine.model_steps import ModelSteps, StepOptions
from megatron_pp.runtime.engine.swapped_outputs import deallocate_output_tensor
from megatron_pp.runtime.stage import PipelineStage

HELP = "ours beside freeing without a wait and waiting right after the send, on a slow link (needs root)"
FREE_AT_ONCE, WAIT_AT_ONCE, OURS = "free at once", "wait at once", "ours"
VARIANTS = (FREE_AT_ONCE, WAIT_AT_ONCE, OURS)
QUICK = {"megabytes": [16.0], "rate_mbit": 2000.0, "forward_ms": 100.0, "rounds": 1}
NOTES = (
    "Exposed: the median step beyond a simulated step whose transfers take no time. Over bound: the median step over a "
    "simulated step whose transfers take the time measured on the idle link, and overlap as far as the order of "
    "compute allows.",
    "In releases: the time per step in which the slowest rank waits for its outputs' sends and frees their memory. "
    "Peak: the most bytes of the CPU's allocator in a separate step, on the worst rank.",
    "Targets of ours: within 3% of free at once, and clearly less than wait at once if a transfer is shorter than a "
    "forward.",
)


@dataclass(frozen=True)
class Setting:
    """The work and the lengths of compute of three rows of the table, one for each variant."""

    work: Work
    sweep: Sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    schedules = ["interleaved_1f1b", "1f1b"]
    add_sweep_arguments(parser, schedules=schedules, microbatches=6, forward_ms=200.0, rate_mbit=1000.0, timeout=600.0)
    add_options(parser, megabytes=([16.0], "MB of one activation; 16 to 64"))


def run(args: argparse.Namespace) -> Report:
    sweep = Sweep.of(args)
    rows: list[Row] = []
    for size in args.pp:
        settings = [
            Setting(work_of(schedule, size, args.microbatches, megabytes * 2**20), sweep)
            for schedule in args.schedules
            for megabytes in args.megabytes
        ]
        per_rank = run_on_shaped_network(_rank, size, (settings,), args.rate_mbit, args.timeout)
        for place, setting in enumerate(settings):
            rows += _rows(setting, [rank[place] for rank in per_rank])
    return Report(
        "overlap",
        "Step time with outputs freed without a wait, waited at once, and as ours, on a shaped link",
        rows,
        sweep_settings(args),
        list(NOTES),
        [column for column in rows[0] if column != "all ms"],
    )


def _rank(rank: int, size: int, settings: list[Setting]) -> list[dict[str, Any]]:
    """For each setting: the time of one transfer, and for each variant its seconds, seconds in releases, and peak
    bytes."""
    import torch.distributed as dist

    results = []
    for setting in settings:
        steps = {name: VariantStep(name, setting, rank, dist.group.WORLD) for name in VARIANTS}
        transfer = transfer_seconds(rank, setting.work.message_bytes)
        peaks = {}
        for name, step in steps.items():  # this step also warms up
            dist.barrier()
            peaks[name] = peak_bytes(step)
        seconds = timed_rounds(steps, setting.sweep.rounds, 0, dist.barrier)
        label = f"{setting.work.label()}, {setting.work.message_bytes / 2**20:g} MB, transfer {1e3 * transfer:.0f} ms"
        print_progress(rank, len(results) + 1, len(settings), label, seconds)
        in_releases = {name: step.in_releases / step.runs for name, step in steps.items()}
        results.append({"transfer": transfer, "seconds": seconds, "peaks": peaks, "in releases": in_releases})
    return results


class VariantStep:
    """One training step under one of the variants. A call runs it."""

    def __init__(
        self,
        variant: str,
        setting: Setting,
        rank: int,
        group: Any,
        transport: Any = None,
        stages: tuple[Callable[..., Any], Callable[..., Any]] = (),  # type: ignore[assignment]
    ) -> None:
        """``stages``: two functions that make a stage from its forward's and backward's seconds, without and with
        copies."""
        work, sweep = setting.work, setting.sweep
        plan = build_plan(setting.work.spec())
        self.plan = wait_at_once(plan) if variant == WAIT_AT_ONCE else plan
        self.executor = FreesAtOnce if variant == FREE_AT_ONCE else PlanExecutor
        make_stage = (stages or (TimedStage, CopyingStage))[variant == FREE_AT_ONCE]
        self.config = SimpleNamespace(pipeline_dtype=torch.float32, p2p_timeout=SECONDS, compute_timeout=SECONDS)
        self.communicator = P2PCommunicator(group, self.config, transport)
        self.communicator.prepare(plan.placement.rank_edges, work.message_bytes, work.message_bytes)
        inner = [make_stage(sweep.forward, sweep.backward) for _ in range(work.num_chunks)]
        self.chunks = [PipelineStage(module, self.config, chunk) for chunk, module in enumerate(inner)]
        self.shape = work.shape
        last = [plan.placement.is_last_stage(rank, chunk) for chunk in range(work.num_chunks)]
        self.options = StepOptions(work.num_microbatches, last)
        self.x = first_input(work).to(self.communicator.device)
        self.losses: list[float] = []
        self.in_releases = 0.0
        self.runs = 0

    def __call__(self) -> None:
        """Run the step. On the last stage ``losses`` then has its losses."""
        releases = ReleaseTimer()
        iterators = [None] * len(self.chunks)
        settings = StepSettings.from_config(self.config)
        steps = ModelSteps(self._forward_step, iterators, self.chunks, settings, self.options)
        hooks = SyncHooks(settings, self.chunks)
        shapes = [Shapes(self.shape, self.shape)]
        self.executor(self.plan, self.communicator, steps, hooks, shapes, observer=releases).run()
        self.losses = [float(loss) for loss in steps.record.data]
        self.in_releases += releases.seconds
        self.runs += 1

    def _forward_step(self, iterator: Any, model: Any) -> tuple[Any, Callable[[Any], Any]]:
        return model(self.x), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = loss_of(output)
    return loss, loss.detach()


def wait_at_once(plan: Plan) -> Plan:
    """``plan``, with the release of every output moved right after its send."""
    programs = []
    for program in plan.programs:
        early: list[ins.Instruction] = []
        for at in program:
            if at.op != ins.FREE_F:
                early.append(at)
            if at.op == ins.SEND_F:
                early.append(at._replace(op=ins.FREE_F))
        programs.append(tuple(early))
    changed = replace(plan, programs=tuple(programs))
    verify(changed)
    return changed


class FreesAtOnce(PlanExecutor):
    """Deallocates an output as soon as its send is posted, and waits for the sends of outputs only at the end of the
    step."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.unwaited: list[WaitHandle] = []

    def run(self) -> None:
        super().run()
        for handle in self.unwaited:
            handle.wait()

    def _forward(self, at: Task) -> None:
        super()._forward(at)
        if at.stage == self.loss_stage:
            self._copies(at).clear()  # the last stage's output is not sent

    def _send_f(self, at: Task) -> None:
        copy = self._copies(at).popleft()
        self.handles[at.message] = self.communicator.post_send(copy, at.peer, ACT)
        deallocate_output_tensor(self.outputs[at.key], True)

    def _free(self, at: Task) -> None:
        if at.op == ins.FREE_F:
            self.unwaited.append(self.handles.pop(at.message))
        else:
            super()._free(at)

    def _copies(self, at: Task) -> deque[torch.Tensor]:
        return self.steps.chunks[at.chunk].inner.copies  # type: ignore[attr-defined]


class ReleaseTimer:
    """An observer of the engine that adds up the seconds in releases of outputs."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def begin(self, at: ins.Instruction) -> None:
        self._began = time.perf_counter()

    def end(self, at: ins.Instruction) -> None:
        if at.op == ins.FREE_F:
            self.seconds += time.perf_counter() - self._began


def _rows(setting: Setting, per_rank: list[dict[str, Any]]) -> list[Row]:
    work, sweep = setting.work, setting.sweep
    transfer = per_rank[0]["transfer"]
    bound, ideal = bound_seconds(work, sweep, transfer), seconds_without_transfers(setting)
    seconds = slowest_rank([rank["seconds"] for rank in per_rank])
    floor = summary(seconds[FREE_AT_ONCE], 1e3)["median"]
    rows: list[Row] = []
    for variant in VARIANTS:
        times = summary(seconds[variant], 1e3)
        rows.append(
            {
                "P": work.pipeline_size,
                "schedule": work.schedule,
                "MB": work.message_bytes / 2**20,
                "transfer / F": transfer / sweep.forward,
                "variant": variant,
                "ms (min)": times["min"],
                "ms (median)": times["median"],
                "of free at once": times["median"] / floor,
                "exposed ms": times["median"] - ideal * 1e3,
                "over bound": times["median"] / (bound * 1e3),
                "in releases ms": 1e3 * max(rank["in releases"][variant] for rank in per_rank),
                "peak MB": max(rank["peaks"][variant] for rank in per_rank) / 2**20,
                "all ms": [1e3 * s for s in seconds[variant]],
            }
        )
    return rows


def seconds_without_transfers(setting: Setting) -> float:
    """Seconds of the step if transfers take no time."""
    costs = setting.sweep.costs(setting.work)
    return simulate(build_plan(setting.work.spec()), costs, Network(0, link=Link(bandwidth=1e15))).makespan

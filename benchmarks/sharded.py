"""Steps of stages that FSDP2 shards over two replicas of the pipeline, under our engine and torch's, on slow links."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks import engine_torch
from benchmarks.rank_processes import run_on_shaped_network, transfer_seconds
from benchmarks.report import Report, Row, add_options
from benchmarks.rounds import beside_bound, print_progress, slowest_rank, timed_rounds
from benchmarks.stages import TimedStage
from benchmarks.sweep import Sweep, best_step, network_of, sweep_settings, work_of
from benchmarks.work import Step, Unavailable, Work
from megatron_pp.feature_table import BY_COST, PER_RUN, PER_STEP
from megatron_pp.features.fsdp.fsdp_instructions import REDUCE_GRAD, WAIT_REDUCE_GRAD
from megatron_pp.plan.ir.spec import Plan

HELP = "steps of stages in FSDP2 beside torch's, with collectives and messages on slow links (needs root)"
QUICK = {"rounds": 1, "forward_ms": 35.0, "ratios": [0.5], "chunks": [1, 2]}
REPLICAS = 2
SCHEDULES = {1: "1f1b", 2: "interleaved_1f1b", 4: "interleaved_1f1b"}
MOST_WHOLE = 3  # stages of a rank that have whole parameters at a time, as in torch's runtime
TORCHS = ("torch", "torch per-edge")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        pp=([2, 4], "pipeline sizes, of two replicas each (default 2 4)"),
        chunks=([1, 2, 4], "stages of a rank: 1 is 1F1B, more are interleaved (default 1 2 4)"),
        microbatches=8,
        forward_ms=(50.0, "milliseconds of one stage's forward; a backward takes twice as long (default 50)"),
        transfer=(0.25, "transfer over forward (default 0.25)"),
        ratios=([0.25, 0.5, 1.0], "gather of a stage's parameters over forward (default 0.25 0.5 1)"),
        rate_mbit=(400.0, "Mbit/s of each direction of each link (default 400)"),
        rounds=3,
        timeout=(900.0, "seconds for each pipeline size"),
    )


def run(args: argparse.Namespace) -> Report:
    sweep = Sweep.of(args)
    message = sweep.message_bytes(args.transfer)
    rows: list[Row] = []
    for size in args.pp:
        works = [
            (ratio, replace(work_of(SCHEDULES[chunks], size, args.microbatches, message), num_chunks=chunks))
            for chunks in args.chunks
            for ratio in args.ratios
        ]
        given = (works, sweep)
        per_rank = run_on_shaped_network(_rank, size * REPLICAS, given, args.rate_mbit, args.timeout)
        for place, (ratio, work) in enumerate(works):
            rows += _rows(ratio, work, sweep, [rank[place] for rank in per_rank])
    return Report(
        "sharded",
        "Step time of sharded stages over the bound",
        rows,
        sweep_settings(args) | {"transfer / F": args.transfer, "replicas": REPLICAS},
        [
            "Gather / F: an all-gather of one stage's parameters over a forward. Bound: the simulated step with the "
            "same order of compute. Messages and collectives take the time measured on the idle links, and overlap as "
            "far as the order allows; at most 3 stages of a rank have whole parameters. On gloo FSDP2 waits for a "
            "reduce-scatter as soon as it posts it, and the bound includes that wait. In the background: the bound "
            "without that wait. Over bound: the median step over the bound.",
            "Targets of ours: at most 1.05, and never above torch.",
        ],
    )


class _Times(NamedTuple):
    """The seconds of one transfer between stages, and of one stage's collectives, on idle links."""

    transfer: float
    gather: float
    reduction: float


class WideStage(TimedStage):
    """A TimedStage of many parameters. Its backward gives gradients of zeros for all of them."""

    def __init__(self, sweep: Sweep, elements: int) -> None:
        super().__init__(sweep.forward, sweep.backward)
        self.weight = nn.Parameter(torch.zeros(elements))


def _elements(sweep: Sweep, ratio: float) -> int:
    """The number of parameters of a stage whose all-gather takes as long as ``ratio`` forwards. In the all-gather each
    replica sends its part to all others."""
    return round(sweep.message_bytes(ratio) / 4 / (REPLICAS - 1)) * REPLICAS


def _rank(rank: int, size: int, works: list[tuple[float, Work]], sweep: Sweep) -> list[dict[str, Any]]:
    """For each work: the times of a transfer and of collectives, and the seconds of each engine's steps."""
    length = size // REPLICAS
    pipelines = [dist.new_group(list(range(first, first + length))) for first in range(0, size, length)]
    across = [dist.new_group(list(range(place, size, length))) for place in range(length)]
    replicas = across[rank % length]
    mesh = DeviceMesh.from_group(replicas, "cpu")
    results = []
    for ratio, work in works:
        elements = _elements(sweep, ratio)
        times = _Times(transfer_seconds(rank, work.message_bytes), *_collective_seconds(elements, replicas))
        make_stage = partial(_sharded_stage, sweep, elements, mesh)
        steps = _steps(work, rank % length, pipelines[rank // length], make_stage)
        seconds = timed_rounds(steps, sweep.rounds, 1, dist.barrier)
        results.append({"times": times, "seconds": seconds})
        print_progress(rank, len(results), len(works), f"{work.label()}, gather / F {ratio:g}", seconds)
    return results


def _sharded_stage(sweep: Sweep, elements: int, mesh: DeviceMesh, stage: int) -> nn.Module:
    return fully_shard(WideStage(sweep, elements), mesh=mesh)


def _steps(work: Work, rank: int, group: Any, make_stage: Callable[[int], nn.Module]) -> dict[str, Step]:
    steps = {"ours": engine_torch.make_ours(work, rank, group, make_stage)}
    for engine in TORCHS:
        try:
            steps[engine] = engine_torch.make(engine, work, rank, group, make_stage, None)
        except Unavailable:
            continue
    return steps


def _collective_seconds(elements: int, group: Any, repeats: int = 5) -> tuple[float, float]:
    """The least seconds of an all-gather and of a reduce-scatter. All ranks call this."""
    warnings.simplefilter("ignore", FutureWarning)  # newer torch has other names for both
    whole, part = torch.zeros(elements), torch.zeros(elements // REPLICAS)
    best = []
    for collective in (
        partial(dist.all_gather_into_tensor, whole, part, group=group),
        partial(dist.reduce_scatter_tensor, part, whole, group=group),
    ):
        times = []
        for _ in range(repeats):
            dist.barrier()
            began = time.perf_counter()
            collective()
            times.append(time.perf_counter() - began)
        best.append(min(times))
    return best[0], best[1]


def bound_seconds(work: Work, sweep: Sweep, times: _Times, change: Callable[[Plan], Plan]) -> float:
    """The shortest step that the order of compute and the limit on whole stages allow."""
    of_each = {"unshard": (times.gather,) * work.num_stages, "reduce_grad": (times.reduction,) * work.num_stages}
    costs = replace(sweep.costs(work), **of_each)
    most = min(MOST_WHOLE, work.num_chunks)
    network = network_of(work, times.transfer)
    kinds = (BY_COST, PER_RUN, *([PER_STEP] if most == work.num_chunks else []))
    return min(
        best_step(work, costs, network, change, fsdp_collectives=kind, fsdp_max_active_stages=most) for kind in kinds
    )


def reductions_waited(plan: Plan) -> Plan:
    """``plan``, with a wait right after each posted reduction, as in FSDP2 on gloo."""
    programs = []
    for program in plan.programs:
        waits = {at.chunk: at for at in program if at.op == WAIT_REDUCE_GRAD}
        others = (at for at in program if at.op != WAIT_REDUCE_GRAD)
        pairs = ((at, waits[at.chunk]) if at.op == REDUCE_GRAD else (at,) for at in others)
        programs.append(tuple(at for pair in pairs for at in pair))
    return replace(plan, programs=tuple(programs))


def _rows(ratio: float, work: Work, sweep: Sweep, per_rank: list[dict[str, Any]]) -> list[Row]:
    times: _Times = per_rank[0]["times"]
    bound, background = (bound_seconds(work, sweep, times, change) for change in (reductions_waited, lambda plan: plan))
    rows: list[Row] = []
    for engine, seconds in slowest_rank([rank["seconds"] for rank in per_rank]).items():
        rows.append(
            {
                "P": work.pipeline_size,
                "schedule": work.schedule,
                "V": work.num_chunks,
                "gather / F": ratio,
                "measured gather / F": times.gather / sweep.forward,
                "measured reduction / F": times.reduction / sweep.forward,
                "engine": engine,
                "bound ms": bound * 1e3,
                "in the background ms": background * 1e3,
                **beside_bound(seconds, bound),
            }
        )
    return rows

"""Steps of packed sequences with lengths from two public traces, in a fixed order and planned one step ahead."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.arrivals import as_it_arrives, sequence_lengths
from benchmarks.engine_ours import step_config
from benchmarks.rank_processes import run_ranks
from benchmarks.report import BenchmarkError, Report, Row, add_options, numbers_of
from benchmarks.stages import SplitTimedStage, TimedStage, mean_loss
from benchmarks.work import step_of
from megatron_pp.features.packing.packing import PackedStep, PackingRules, packed, pair_cost
from megatron_pp.features.packing.step_ahead import NextStep, plan_ahead
from megatron_pp.features.packing.steps import PackedSteps
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.weight_grad import split_weight_grad

HELP = "steps of packed sequences of public length distributions, planned one step ahead, beside a fixed order"
QUICK = {"steps": 2, "forward_ms": 20.0}
_HIDDEN = 8  # floats of a message for each token
_LAYER = (4096, 14336)  # hidden and FFN size of the layers, which decide the cost of a sequence's attention
_RANKS_AND_TOKENS = {"azure": (4, 4096), "mooncake": (8, 16384)}
_SCHEDULES = {"1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2}


@dataclass(frozen=True)
class Case:
    """One setting. ``splits``: the model can defer weight gradients, and the plan of a step may use that."""

    trace: str
    rules: PackingRules
    schedule: str
    splits: bool

    @property
    def chunks(self) -> int:
        return _SCHEDULES[self.schedule]

    def stage(self, seconds: float) -> TimedStage:
        return SplitTimedStage(seconds, seconds, seconds) if self.splits else TimedStage(seconds, 2 * seconds)


def rules_of(trace: str) -> PackingRules:
    """The packing rules of a trace. They have enough ranks, and enough tokens on each rank, for its longest
    sequence."""
    return PackingRules(*_RANKS_AND_TOKENS[trace], pair_cost(*_LAYER))


def cases(lengths: Sequence[str], schedules: Sequence[str]) -> list[Case]:
    kinds = [("1f1b", False), ("1f1b", True), ("zb_h1", True), ("interleaved_1f1b", False)]
    return [Case(trace, rules_of(trace), *kind) for trace in lengths for kind in kinds if kind[0] in schedules]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        pp=4,
        sequences=(128, "sequences of a step, on all pipelines"),
        steps=6,
        forward_ms=(
            80.0,
            "milliseconds of a rank's whole forward, on average over the microbatches; its backward takes twice that",
        ),
        timeout=900.0,
    )
    parser.add_argument("--lengths", nargs="+", choices=list(_RANKS_AND_TOKENS), default=list(_RANKS_AND_TOKENS))
    parser.add_argument("--schedules", nargs="+", choices=list(_SCHEDULES), default=list(_SCHEDULES))


def run(args: argparse.Namespace) -> Report:
    return Report(
        "packing",
        "Steps of packed sequences, planned one step ahead and in a fixed order",
        [_row(case, args) for case in cases(args.lengths, args.schedules)],
        numbers_of(args),
        [
            "Lengths are drawn from benchmarks/sequence_lengths.csv (azure: Azure LLM inference trace 2023, "
            "conversations, packed for 4 pipelines of 4,096 tokens a microbatch; mooncake: Mooncake's FAST'25 "
            "conversation trace, for 8 pipelines of 16,384). Costs are those of layers with hidden size 4,096 and FFN "
            "14,336. Fixed: the microbatches in the order in which their first sequences arrive, under the schedule. "
            "Planned: the same microbatches in the order and under the plan that PackedSteps finds while the previous "
            "step runs. Simulated: transfers take no time. Measured: compute sleeps as long as the slowest pipeline's "
            "compute takes, gloo on the loopback; medians over the steps. Longest: the cost of the costliest "
            "microbatch over the mean cost. Waited: the time per step that ranks wait for the search."
        ],
    )


def _row(case: Case, args: argparse.Namespace) -> Row:
    lengths = [sequence_lengths(case.trace, args.sequences, seed) for seed in range(args.steps + 1)]
    given = [packed(one, case.rules) for one in lengths]
    seconds = args.forward_ms / 1e3 / case.chunks
    per_rank = run_ranks(_rank, args.pp, (case, lengths, seconds), timeout=args.timeout)
    simulated = [_simulated(case, args.pp, step) for step in given[1:]]
    if [costs for *_, costs in simulated] != per_rank[0]["costs"]:
        raise BenchmarkError("the ranks ran other orders than were simulated")
    planned, fixed = ([max(times) for times in zip(*(rank[name] for rank in per_rank), strict=True)] for name in _RUNS)
    counts = sorted(len(step.slots) for step in given[1:])
    waited = max(rank["waited"][0] for rank in per_rank)
    row = {
        "lengths": case.trace,
        "schedule": case.schedule,
        "W put off": "yes" if case.splits else "no",
        "M": f"{counts[0]} to {counts[-1]}",
        "longest": statistics.mean(max(step.costs) / statistics.mean(step.costs) for step in given[1:]),
        **_compared("simulated ", [seconds * one[0] for one in simulated], [seconds * one[1] for one in simulated]),
        **_compared("", planned, fixed),
        "waited ms": 1e3 * waited / args.steps,
    }
    ratios = [row[f"{kind}planned / fixed"] for kind in ("simulated ", "")]
    print("{}, {}: {:.3f} simulated, {:.3f} measured".format(case.trace, case.schedule, *ratios), file=sys.stderr)
    return row


def _compared(kind: str, planned: Sequence[float], fixed: Sequence[float]) -> Row:
    """The medians over the steps of both times and of their ratio."""
    medians = (1e3 * statistics.median(times) for times in (planned, fixed))
    ratio = statistics.median(mine / theirs for mine, theirs in zip(planned, fixed, strict=True))
    row = dict(zip((f"{kind}planned ms", f"{kind}fixed ms"), medians, strict=True))
    return row | {f"{kind}planned / fixed": ratio}


_RUNS = ("planned", "fixed")


def _simulated(case: Case, size: int, step: PackedStep) -> tuple[float, float, tuple[float, ...]]:
    """The simulated steps in the planned and in the fixed order, in forwards of a stage, and the costs in the planned
    order."""
    spec = PlanSpec(case.schedule, size, case.chunks, len(step.slots))
    found = plan_ahead(NextStep(spec, step.costs, splits=case.splits))
    running = build_plan(spec)
    plan = running if found.proposal is None else found.proposal.plan()
    planned = step.ordered(found.order)
    return _makespan(plan, planned), _makespan(running, as_it_arrives(step)), planned.costs


def _makespan(plan: Plan, step: PackedStep) -> float:
    costs = StageCosts.uniform(plan.placement.num_stages)
    return simulate(plan, replace(costs, microbatches=_shares(step))).makespan


def _shares(step: PackedStep) -> tuple[float, ...]:
    mean = statistics.mean(step.costs)
    return tuple(cost / mean for cost in step.costs)


def _rank(rank: int, size: int, case: Case, lengths: Sequence[Sequence[int]], seconds: float) -> dict[str, list[Any]]:
    """For each step except the first: its seconds as planned and in the fixed order, in turns, and its planned
    costs."""
    found: dict[str, list[Any]] = {"planned": [], "fixed": [], "costs": []}
    arriving = [as_it_arrives(packed(one, case.rules)) for one in lengths]
    unplanned = _Pipeline(case, size, 0.0)
    for step in arriving:
        unplanned.timed(step)  # the process makes and keeps the plan for this number of microbatches
    steps = PackedSteps(lengths, case.rules)
    planned = _Pipeline(case, size, seconds, microbatch_costs=steps)
    fixed = _Pipeline(case, size, seconds)
    step = steps.next()
    for place, arrived in enumerate(arriving, 1):
        found["planned"].append(planned.timed(step))
        found["costs"].append(step.costs)
        if place < len(arriving):
            step = steps.next()  # called here, so that a search has the time of one step
        found["fixed"].append(fixed.timed(arrived))
    return {name: values[1:] for name, values in found.items()} | {"waited": [steps.waited]}


class _Pipeline:
    """One rank of the first pipeline. Its microbatches take as long as those of the slowest pipeline."""

    def __init__(self, case: Case, size: int, seconds: float, **fields: Any) -> None:
        import torch.distributed as dist

        chunks = case.chunks if case.chunks > 1 else None
        config = step_config(
            size,
            size * case.chunks,
            _HIDDEN,
            1,
            variable_seq_lengths=True,
            pipeline_schedule=case.schedule,
            virtual_pipeline_model_parallel_size=chunks,
            **fields,
        )
        self.chunks = [PipelineStage(case.stage(seconds), config, chunk) for chunk in range(case.chunks)]
        if case.splits:
            split_weight_grad(self.chunks)
        self.step_of = partial(step_of, get_forward_backward_func(size, chunks), _forward_step, self.chunks)
        self.communicator = P2PCommunicator(dist.group.WORLD, config)

    def timed(self, step: PackedStep) -> float:
        import torch.distributed as dist

        packs = step.of_rank(0)
        shares = _shares(step)
        shapes = [-(-pack.tokens // pack.context) for pack in packs]

        def data() -> Iterator[tuple[torch.Tensor, float]]:
            for tokens, share in zip(shapes, shares, strict=True):
                yield torch.zeros(tokens, 1, _HIDDEN), share

        call = self.step_of(data, len(packs), max(shapes), p2p_communicator=self.communicator)
        dist.barrier()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began


def _forward_step(data_iterator: Any, model: Any) -> Any:
    x, model.inner.cost = next(data_iterator)
    return model(x), mean_loss

"""Compares an output layer that is split over all ranks with an output layer on the last stage. Compute takes a known
time, and the output layer costs as much as several transformer layers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine_ours import step_config, step_of_model
from benchmarks.rank_processes import run_ranks
from benchmarks.report import Report, Row, add_options, numbers_of
from benchmarks.slices import median_ms
from benchmarks.stages import TimedStage, lasting, mean_loss
from benchmarks.work import Step
from megatron_pp.features.output_layer.output_runner import SplitOutputLayer
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.runtime.stage import PipelineStage

HELP = "the step with an output layer that is split over all ranks, beside 1f1b with it on the last stage"
QUICK: dict[str, Any] = {"steps": 1, "layer_ms": 5.0}
CASES = ("1f1b", "vocab_1f1b", "vocab_1f1b_alg1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layer = 10.0, "milliseconds of a layer's forward; its backward takes twice as long"
    add_options(parser, pp=4, microbatches=16, layers=(4, "layers of each rank"), layer_ms=layer)
    add_options(parser, output_layers=(2.4, "cost of the output layer, in transformer layers"))
    add_options(parser, steps=(3, "timed steps of each; one more comes before"), timeout=280.0)


def run(args: argparse.Namespace) -> Report:
    per_rank = run_ranks(_rank, args.pp, (args,), timeout=args.timeout)
    return Report(
        "vocabulary",
        "The output layer on the last stage, and split over all ranks",
        [_row(args, name, [rank[name] for rank in per_rank]) for name in CASES],
        numbers_of(args),
        [
            "Balanced: 1F1B on ranks that share all work evenly, with the output layer: "
            f"{_balanced_ms(args):,.0f} ms. Target: within 3%.",
            "Compute sleeps; collectives and messages are real, on gloo. In the simulation transfers take no time.",
        ],
    )


def _row(args: argparse.Namespace, name: str, of_ranks: list[float]) -> Row:
    layer = args.layer_ms
    balanced = _balanced_ms(args)
    costs = StageCosts.uniform(args.pp, *(args.layers * layer,) * 3)
    costs = replace(costs, output_layer=(args.output_layers * layer,) * 3)
    simulated = simulate(build_plan(PlanSpec(name, args.pp, 1, args.microbatches)), costs).makespan
    return {
        "schedule": name,
        "simulated ms": simulated,
        "step ms": max(of_ranks),
        "simulated over balanced": f"{simulated / balanced - 1:+.1%}",
        "measured over balanced": f"{max(of_ranks) / balanced - 1:+.1%}",
    }


def _balanced_ms(args: argparse.Namespace) -> float:
    of_rank = 3 * args.layer_ms * (args.layers + args.output_layers / args.pp)
    return float(of_rank * args.microbatches + (args.pp - 1) * 3 * args.layer_ms * args.layers)


def _rank(rank: int, size: int, args: argparse.Namespace) -> dict[str, float]:
    return {name: median_ms(_step(rank, size, args, name), args.steps) for name in CASES}


def _step(rank: int, size: int, args: argparse.Namespace, name: str) -> Step:
    layer = args.layer_ms / 1e3
    barriers = SCHEDULES[name].barriers
    third = args.output_layers * layer / size

    class TimedOutput(SplitOutputLayer):
        """A split output layer whose passes S and T take their share of the layer's time."""

        def pass_s(self, *given: Any) -> None:
            with lasting(third * (2 if barriers == 1 else 1)):
                super().pass_s(*given)

        def pass_t(self, *given: Any) -> None:
            with lasting(third * (1 if barriers == 1 else 2)):
                super().pass_t(*given)

    own = args.layers + (args.output_layers if not barriers and rank == size - 1 else 0.0)
    stage = torch.nn.Module()
    stage.timed = TimedStage(own * layer, 2 * own * layer)
    if barriers:
        stage.output = TimedOutput(8, 4 * size, rank, size)
    stage.forward = stage.timed.forward  # type: ignore[method-assign]
    chunk = PipelineStage(stage, step_config(size, size, 8, 1, pipeline_schedule=name))

    def forward_step(data_iterator: Any, model: Any) -> Any:
        x, labels = next(data_iterator)
        hidden = model(x)
        return (stage.output(hidden, labels) if barriers else hidden), mean_loss

    def data() -> Iterator[Any]:
        return iter([(torch.zeros(4, 1, 8), torch.zeros(4, 1, dtype=torch.int64))] * args.microbatches)

    return step_of_model(chunk, forward_step, data, args.microbatches, 4)

"""An output layer that is split over all ranks, beside one on the last stage: steps of ranks whose compute takes a
known time, of which the output layer takes that of some transformer layers more."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.engines import Step
from benchmarks.rank_processes import run_ranks
from benchmarks.report import Report, Row
from benchmarks.slices import median_ms
from benchmarks.stages import TimedStage, mean_loss, sleep_until
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs import StageCosts
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.sim.simulate import simulate
from megatron_pp.plan.spec import PlanSpec

HELP = "the step with an output layer that is split over all ranks, beside 1f1b with it on the last stage"
QUICK: dict[str, Any] = {"steps": 1, "layer_ms": 5.0}
CASES = ("1f1b", "vocab_1f1b", "vocab_1f1b_alg1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4, help="of each rank")
    parser.add_argument(
        "--layer-ms", type=float, default=10.0, help="forward of a layer; its backward takes twice as long"
    )
    parser.add_argument(
        "--output-layers", type=float, default=2.4, help="layers that the output layer costs as much as"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each; one more comes before")
    parser.add_argument("--timeout", type=float, default=280.0)


def run(args: argparse.Namespace) -> Report:
    per_rank = run_ranks(_rank, args.pp, (args,), timeout=args.timeout)
    return Report(
        "vocabulary",
        "The output layer on the last stage, and split over all ranks",
        ["schedule", "simulated ms", "step ms", "simulated over balanced", "measured over balanced"],
        [_row(args, name, [rank[name] for rank in per_rank]) for name in CASES],
        {name: value for name, value in vars(args).items() if type(value) in (int, float)},
        [
            "Balanced: 1F1B on ranks that share all work evenly, output layer included: "
            f"{_balanced_ms(args):,.0f} ms. Wanted: within 3%.",
            "Compute sleeps; collectives and messages are real, on gloo. Simulated with free transfers.",
        ],
    )


def _row(args: argparse.Namespace, name: str, of_ranks: list[float]) -> Row:
    layer, balanced = args.layer_ms, _balanced_ms(args)
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
    import time

    import torch
    import torch.distributed as dist

    from benchmarks.engine_ours import SECONDS
    from megatron_pp import (
        P2PCommunicator,
        PipelineStage,
        SplitOutputLayer,
        TransformerConfig,
        get_forward_backward_func,
    )

    layer, barriers = args.layer_ms / 1e3, SCHEDULES[name].barriers
    third = args.output_layers * layer / size

    class TimedOutput(SplitOutputLayer):
        """S and T that take their share of the output layer's time."""

        def pass_s(self, *given: Any) -> None:
            until = time.perf_counter() + third * (2 if barriers == 1 else 1)
            super().pass_s(*given)
            sleep_until(until)

        def pass_t(self, *given: Any) -> None:
            until = time.perf_counter() + third * (1 if barriers == 1 else 2)
            super().pass_t(*given)
            sleep_until(until)

    own = args.layers + (args.output_layers if not barriers and rank == size - 1 else 0.0)
    stage = torch.nn.Module()
    stage.timed = TimedStage(own * layer, 2 * own * layer)
    if barriers:
        stage.output = TimedOutput(8, 4 * size, rank, size)
    stage.forward = stage.timed.forward  # type: ignore[method-assign]
    config = TransformerConfig(
        pipeline_model_parallel_size=size,
        pipeline_dtype=torch.float32,
        pipeline_schedule=name,
        overlap_p2p_comm=True,
        p2p_timeout=SECONDS,
        compute_timeout=SECONDS,
        num_layers=size,
        hidden_size=8,
        num_attention_heads=1,
    )
    chunk, communicator = PipelineStage(stage, config), P2PCommunicator(dist.group.WORLD, config)

    def forward_step(data_iterator: Any, model: Any) -> Any:
        x, labels = next(data_iterator)
        hidden = model(x)
        return (stage.output(hidden, labels) if barriers else hidden), mean_loss

    def step() -> None:
        get_forward_backward_func(size)(
            forward_step_func=forward_step,
            data_iterator=iter([(torch.zeros(4, 1, 8), torch.zeros(4, 1, dtype=torch.int64))] * args.microbatches),
            model=chunk,
            num_microbatches=args.microbatches,
            seq_length=4,
            micro_batch_size=1,
            p2p_communicator=communicator,
        )

    return step

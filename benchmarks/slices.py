"""Slices of sequences compared with 1F1B at equal tokens: steps of ranks whose compute takes a known time, and peak
memory and steps of a real GPT."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.engine_ours import step_config, step_of_model
from benchmarks.memory import peak_bytes
from benchmarks.rank_processes import run_ranks
from benchmarks.report import Report, Row, add_options, numbers_of
from benchmarks.stages import TimedStage, mean_loss
from benchmarks.work import Step
from megatron_pp.features.slices.sequence_slice import sequence_slice
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.runtime.stage import PipelineStage

HELP = "peak memory and step time of seq_1f1b beside 1f1b, at equal tokens"
QUICK: dict[str, Any] = {"steps": 1, "layers": 4, "hidden": 64, "seq": 512}
_MIB = 2**20


class Case(NamedTuple):
    slices: int
    balanced: bool = False

    @property
    def schedule(self) -> str:
        return "1f1b" if self.slices == 1 else "seq_1f1b"


CASES = (Case(1), Case(2), Case(4), Case(8), Case(4, balanced=True))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sleep = 80.0, "milliseconds of a microbatch's forward, if stages sleep"
    add_options(parser, pp=4, microbatches=4, seq=2048, layers=8, hidden=128, forward_ms=sleep)
    add_options(parser, steps=(3, "timed steps of each; one more comes before"), timeout=500.0)


def run(args: argparse.Namespace) -> Report:
    per_rank = run_ranks(_rank, args.pp, (args,), timeout=args.timeout)
    rows = [_row(args, case, [rank[case] for rank in per_rank]) for case in CASES]
    return Report(
        "slices",
        "Sequences in slices, at equal tokens",
        rows,
        numbers_of(args),
        [
            "Step: the median of steps whose stages sleep; a backward takes twice as long as a forward. Predicted: the "
            "simulator's step, in which transfers take no time.",
            "GPT: examples.gpt in fp32. Its ranks share this machine's cores, so another rank fills each bubble. Peak: "
            "the most bytes of the CPU's allocator in the first step, with the logits of the last rank.",
            "Balanced: slices of equal cost under causal attention.",
        ],
    )


def _row(args: argparse.Namespace, case: Case, of_ranks: list[Row]) -> Row:
    plan = build_plan(PlanSpec(case.schedule, args.pp, 1, args.microbatches, slices=case.slices))
    forward = args.forward_ms
    peaks = [rank["peak"] / _MIB for rank in of_ranks]
    return {
        "schedule": case.schedule,
        "slices": f"{case.slices}{', balanced' if case.balanced else ''}",
        "predicted ms": simulate(plan, StageCosts.uniform(args.pp, forward, forward, forward)).makespan,
        "step ms": max(rank["sleeping"] for rank in of_ranks) if not case.balanced else None,
        "GPT step ms": max(rank["gpt"] for rank in of_ranks),
        "GPT peak MiB, rank 0": peaks[0],
        "worst rank": max(peaks),
    }


def _rank(rank: int, size: int, args: argparse.Namespace) -> dict[Case, Row]:
    """For each case: the milliseconds of a step of both models, and the peak bytes of the GPT's first step."""
    found: dict[Case, Row] = {}
    for case in CASES:
        gpt = _gpt_step(rank, size, args, case)
        peak = peak_bytes(gpt)
        found[case] = {"peak": peak, "gpt": median_ms(gpt, args.steps)}
        if not case.balanced:
            found[case]["sleeping"] = median_ms(_sleeping_step(size, args, case), args.steps)
    return found


def median_ms(step: Step, steps: int) -> float:
    """The median milliseconds of ``steps`` steps that begin together on all ranks, after one more step."""
    times = []
    for _ in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        step()
        dist.barrier()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def _sleeping_step(size: int, args: argparse.Namespace, case: Case) -> Step:
    seconds = args.forward_ms / 1e3 / case.slices
    chunk = PipelineStage(TimedStage(seconds, 2 * seconds), _config(size, args, case))

    def forward_step(data_iterator: Any, model: Any) -> Any:
        (x,) = next(data_iterator)
        part = sequence_slice()
        return model(x if part is None else part.of(x, 0)), mean_loss

    def data() -> Iterator[Any]:
        return ((torch.zeros(args.seq, 1, args.hidden),) for _ in range(args.microbatches))

    return step_of_model(chunk, forward_step, data, args.microbatches, args.seq)


def _gpt_step(rank: int, size: int, args: argparse.Namespace, case: Case) -> Step:
    from examples.gpt.gpt import build_gpt_chunks
    from examples.gpt.trainer import forward_step

    config = _config(size, args, case)
    options: dict[str, Any] = {"vocab_size": 256, "max_sequence_length": args.seq}
    options |= {"layers_of_stage": config.layers_of_stages(), "share_embeddings_and_output_weights": False}
    (chunk,) = build_gpt_chunks(config, stages=[rank], **options)

    def data() -> Iterator[Any]:
        text = torch.zeros(1, args.seq, dtype=torch.int64)
        return ((number, text, text) for number in range(args.microbatches))

    return step_of_model(chunk, forward_step, data, args.microbatches, args.seq)


def _config(size: int, args: argparse.Namespace, case: Case) -> Any:
    slices = {"sequence_slices": case.slices, "balance_sequence_slices": case.balanced}
    return step_config(size, args.layers, args.hidden, 4, hidden_dropout=0.0, attention_dropout=0.0, **slices)

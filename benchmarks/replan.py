"""A run that plans itself anew while a rank becomes slower and a link narrower, beside plans that stay as they are."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engine_ours import step_config
from benchmarks.rank_processes import run_on_shaped_network
from benchmarks.report import Report, Row
from benchmarks.shaped_network import set_rate
from benchmarks.stages import TimedStage, mean_loss
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.runtime.stage import PipelineStage
from megatron_pp.schedules import get_forward_backward_func

HELP = (
    "a run with pipeline_replan, one rank of which is slowed and one link of which is cut, beside static plans (root)"
)
QUICK = {"steps": 60, "slow_at": 15, "cut_at": 38, "every": 5, "rounds": 3}
PHASES = ("as it began", "one rank slowed", "one link cut too")


@dataclass(frozen=True)
class Case:
    """What runs. Seconds of a whole forward and backward of a rank; ``message`` in bytes; rates in Mbit/s."""

    size: int
    chunks: int
    microbatches: int
    forward: float
    backward: float
    message: int
    rate: float
    slow_rank: int
    slowed: float
    link: int
    cut: float
    memory: float

    def factor(self, phase: int, rank: int) -> float:
        return self.slowed if phase and rank == self.slow_rank else 1.0

    def rate_in(self, phase: int) -> float:
        """Of the link that is cut."""
        return self.rate * (self.cut if phase == 2 else 1.0)

    def measured(self, phase: int) -> Measured:
        """The true values, by stage, for a search."""
        ranks = range(self.size)
        times = [[self.factor(phase, rank) * of / self.chunks for rank in ranks] * self.chunks for of in self.times]
        wire, cut = (8e-6 * self.message / rate for rate in (self.rate, self.rate_in(phase)))
        ends = (self.link, self.link + 1)
        return Measured(
            forward=tuple(times[0]),
            backward_input=tuple(times[1]),
            weight=0.0,
            backward=tuple(times[1]),
            transfer=wire,
            links=((*ends, cut), (*ends[::-1], cut)),
            memory_limit=self.memory * self.chunks,
            weight_activation=0.0,
        )

    @property
    def times(self) -> tuple[float, float]:
        return self.forward, self.backward


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=6)
    parser.add_argument("--forward-ms", type=float, default=15.0, help="of a rank's whole forward")
    parser.add_argument("--backward-ms", type=float, default=45.0, help="of its whole backward, with recomputation")
    parser.add_argument("--transfer", type=float, default=0.15, help="of one message, in forwards, as the run begins")
    parser.add_argument("--rate-mbit", type=float, default=400.0)
    parser.add_argument("--memory", type=float, default=8.0, help="microbatches that a rank may keep")
    parser.add_argument("--slow-rank", type=int, default=1)
    parser.add_argument("--slowed", type=float, default=1.5)
    parser.add_argument("--link", type=int, default=0, help="the one between this rank and the next")
    parser.add_argument("--cut", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--slow-at", type=int, default=50)
    parser.add_argument("--cut-at", type=int, default=150)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument(
        "--rounds", type=int, default=10, help="steps at the end of a phase in which all plans take turns"
    )
    parser.add_argument("--timeout", type=float, default=900.0)


def run(args: argparse.Namespace) -> Report:
    forward = args.forward_ms / 1e3
    message = 4 * int(args.transfer * forward * args.rate_mbit * 1e6 / 8 / 4)
    case = Case(
        args.pp, args.chunks, args.microbatches, forward, args.backward_ms / 1e3, message, args.rate_mbit,
        args.slow_rank, args.slowed, args.link, args.cut, args.memory,
    )  # fmt: skip
    begins = (1, args.slow_at, args.cut_at, args.steps + 1)
    timeout, ranks = args.timeout, (case, begins, args.every, args.rounds)
    per_rank = run_on_shaped_network(_rank, args.pp, ranks, args.rate_mbit, timeout)
    rows = [_row(phase, per_rank) for phase in range(3)]
    names = ("chunks", "microbatches", "forward_ms", "backward_ms", "transfer", "rate_mbit", "memory", "slow_rank")
    names += ("slowed", "link", "cut", "steps", "slow_at", "cut_at", "every", "rounds")
    return Report(
        "replan",
        "A run that plans itself anew, beside plans that stay",
        rows,
        {"P": args.pp, **{name.replace("_", " "): getattr(args, name) for name in names}},
        [
            "Compute sleeps; gloo over shaped links. All plans but 1F1B are `auto`'s: of the first column by what the "
            "run has measured by itself, of the second one by the true times of the phase (or another static plan, "
            "where that is faster), of the third one by those of the first phase. Medians of the last steps of a phase "
            "(rounds), in which the run and the static plans take turns. Wanted: at most 1.05 times the best static "
            "plan, and the first plan at least 1.15 times the re-planned one."
        ],
    )


def _row(phase: int, per_rank: list[dict[str, list[list[float]]]]) -> Row:
    """Medians over the turns of the phase, in each of which the slowest rank counts."""
    seconds = {
        name: statistics.median(map(max, zip(*(rank[name][phase] for rank in per_rank), strict=True)))
        for name in per_rank[0]
    }
    own, first = seconds["run"], seconds["first"]
    best = min(time for name, time in seconds.items() if name != "run")
    return {
        "phase": PHASES[phase],
        "re-planned ms": 1e3 * own,
        "best static ms": 1e3 * best,
        "first plan ms": 1e3 * first,
        "1f1b ms": 1e3 * seconds["1f1b"],
        "over best static": own / best,
        "first plan over": first / own,
    }


class _Pipeline:
    """One rank's stages and a step of them."""

    def __init__(self, case: Case, rank: int, **fields: Any) -> None:
        import torch.distributed as dist

        self.case, self.rank = case, rank
        chunks = case.chunks if case.chunks > 1 else None
        config = step_config(
            case.size,
            case.size * case.chunks,
            case.message // 4,
            1,
            virtual_pipeline_model_parallel_size=chunks,
            **fields,
        )
        self.stages = [TimedStage(0.0, 0.0) for _ in range(case.chunks)]
        stage = functools.partial(PipelineStage, config=config)
        self.model = [stage(module) for module in self.stages]
        self.enter(0)
        self.step_of = get_forward_backward_func(case.size, chunks)
        self.group = SimpleNamespace(pp=dist.group.WORLD)

    def enter(self, phase: int) -> None:
        factor = self.case.factor(phase, self.rank) / self.case.chunks
        for stage in self.stages:
            stage.seconds = (factor * self.case.forward, factor * self.case.backward)

    def step(self) -> None:
        case = self.case
        data = [iter([torch.zeros(1, 1, case.message // 4)] * case.microbatches) for _ in self.model]
        several = len(self.model) > 1
        self.step_of(
            forward_step_func=_forward_step,
            data_iterator=data if several else data[0],
            model=self.model if several else self.model[0],
            num_microbatches=case.microbatches,
            seq_length=1,
            micro_batch_size=1,
            pg_collection=self.group,
        )


def _forward_step(data_iterator: Any, model: Any) -> Any:
    return model(next(data_iterator)), mean_loss


def _rank(
    rank: int, size: int, case: Case, begins: tuple[int, ...], every: int, rounds: int
) -> dict[str, list[list[float]]]:
    """The run, which begins with the best plan of the first phase. In the last ``rounds`` steps of each phase static
    plans take turns with it: seconds of each of these steps, by plan and phase.
    """
    first = {"pipeline_schedule": "auto", "pipeline_measured": case.measured(0)}
    run = _Pipeline(case, rank, pipeline_replan=f"every:{every}", **first)
    seconds: dict[str, list[list[float]]] = {name: [] for name in ("run", "best", "first", "1f1b")}
    for phase, (begin, end) in enumerate(pairwise(begins)):
        run.enter(phase)
        _cut(case, rank, phase)
        for step in range(begin, end - rounds):
            took = _timed(run)
            if rank == 0 and step % every == 0:
                print(f"step {step}: {1e3 * took:.0f} ms", file=sys.stderr, flush=True)
        plans: dict[str, dict[str, Any]] = {
            "best": {"pipeline_schedule": "auto", "pipeline_measured": case.measured(phase)},
            "first": first,
            "1f1b": {},
        }
        turns = {"run": run, **{name: _Pipeline(case, rank, **fields) for name, fields in plans.items()}}
        for name, pipeline in turns.items():
            pipeline.enter(phase)
            if name != "run":
                _timed(pipeline)  # makes its plan, and connects
            seconds[name].append([])
        for _ in range(rounds):
            for name, pipeline in turns.items():
                seconds[name][phase].append(_timed(pipeline))
    return seconds


def _timed(pipeline: _Pipeline) -> float:
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    pipeline.step()
    return time.perf_counter() - began


def _cut(case: Case, rank: int, phase: int) -> None:
    """This rank's end of the link."""
    if rank in (case.link, case.link + 1):
        set_rate(rank, 2 * case.link + 1 - rank, case.rate_in(phase))

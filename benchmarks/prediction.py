"""The simulated and the measured length of a step, with gloo on a shaped link and compute of known length.

By default compute is long and the link is slow, so that a busy machine has little effect.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.engines import make_step
from benchmarks.rank_processes import run_on_shaped_network, transfer_seconds
from benchmarks.report import Report, Row, add_options
from benchmarks.rounds import print_progress, summary, timed_rounds
from benchmarks.sweep import Sweep, sweep_settings, work_of
from benchmarks.sweep import add_arguments as add_sweep_arguments
from benchmarks.work import Work
from megatron_pp.config.setting_names import variable_of
from megatron_pp.plan.costs.stage_costs import Link, Network
from megatron_pp.plan.ir.spec import POLICIES
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.tracing.run import load_run

HELP = "the simulator's step time against the measured one, on a slow link (needs root)"
QUICK = {"forward_ms": 30.0, "rounds": 1}
_WARMUP = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    schedules = ["1f1b", "interleaved_1f1b"]
    add_sweep_arguments(parser, schedules=schedules, microbatches=8, forward_ms=200.0, rate_mbit=100.0, timeout=500.0)
    add_options(parser, ratios=([0.25, 1.0], "transfer over forward"))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))


def run(args: argparse.Namespace) -> Report:
    sweep = Sweep.of(args)
    rows: list[Row] = []
    for size in args.pp:
        works = [
            (ratio, replace(work_of(schedule, size, args.microbatches, sweep.message_bytes(ratio)), policy=policy))
            for schedule in args.schedules
            for policy in args.policies
            for ratio in args.ratios
        ]
        with tempfile.TemporaryDirectory() as folder:
            transfers = run_on_shaped_network(_rank, size, (works, sweep, folder), args.rate_mbit, args.timeout)[0]
            rows += [
                _row(ratio, work, sweep, transfers[k], Path(folder) / str(k)) for k, (ratio, work) in enumerate(works)
            ]
    return Report(
        "prediction",
        "The simulator's step time against the measured one, on a shaped link",
        rows,
        sweep_settings(args),
        [
            "Predicted: from the plan that ran, the set length of compute, and the time of one transfer on the idle "
            "link. Measured: from the merged traces of all ranks. Off by: predicted over the measured median, minus "
            "one.",
            "Target: within 0.05.",
        ],
    )


def _rank(rank: int, size: int, works: list[tuple[float, Work]], sweep: Sweep, folder: str) -> list[float]:
    """Run every work, with its traces in a folder of its own. Returns the time of one transfer for each."""
    import torch.distributed as dist

    os.environ[variable_of("trace_steps")] = f"{_WARMUP + 1}-{_WARMUP + sweep.rounds}"
    transfers = []
    for k, (ratio, work) in enumerate(works):
        os.environ[variable_of("trace_dir")] = os.path.join(folder, str(k))
        transfers.append(transfer_seconds(rank, work.message_bytes))
        step = make_step("ours", work, rank, dist.group.WORLD, sweep.stage)
        seconds = timed_rounds({"ours": step}, sweep.rounds, _WARMUP, dist.barrier)
        print_progress(rank, k + 1, len(works), f"{work.label()}, transfer / F {ratio:g}", seconds)
    return transfers


def _row(ratio: float, work: Work, sweep: Sweep, transfer: float, folder: Path) -> Row:
    traced = load_run(folder)
    times = summary([traced.measured(step).makespan for step in traced.steps])
    costs = sweep.costs(work, 1e3)
    link = Link(bandwidth=work.message_bytes / (transfer * 1e3))
    network = Network(work.message_bytes, link=link, gloo=True)
    predicted = simulate(traced.plan(traced.steps[0]), costs, network).makespan
    return {
        "P": work.pipeline_size,
        "schedule": work.schedule,
        "policy": work.policy,
        "transfer / F": ratio,
        "predicted ms": predicted,
        "ms (min)": times["min"],
        "ms (median)": times["median"],
        "off by": predicted / times["median"] - 1.0,
    }

"""The bubble of zero-bubble schedules under ``install()``: Megatron-core's GPTModel on gloo, stages of known length.

Each transformer layer sleeps in place of its second norm: in forward, for its input gradients and for its weight
gradients. So cores stay free. Megatron's own linear layers also compute, and are split as in training. The bubble is
that of the recorded steps, as ``megatron-pp report`` prints it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.bubble import Lengths, add_step_arguments
from benchmarks.rank_processes import run_ranks
from benchmarks.report import Report, Row, add_options, numbers_of
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.run import load_run
from testkit.megatron.cases import Case, Model

HELP = "the bubble of 1F1B and zero bubble on Megatron's GPTModel under install(), measured beside the simulator's"
QUICK = {"rounds": 2}
SCHEDULES = {"1f1b": None, "zb_h1": None, "interleaved_1f1b": 2, "interleaved_zb": 2}  # schedule -> V


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_arguments(parser)
    add_options(parser, rounds=(4, "recorded steps; the table has the step of median length"))
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))


def run(args: argparse.Namespace) -> Report:
    lengths = Lengths.of(args)
    layers = 2 * args.pp
    cases = [
        Case(
            Model(layers=layers), pp=args.pp, vp=SCHEDULES[name], microbatches=args.microbatches, policy="overlap",
            schedule=name, steps=args.rounds + 1,
        )
        for name in args.schedules
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_rank, args.pp, (cases, lengths, folder), timeout=args.timeout)
        rows = [_row(case, lengths, Path(folder) / str(case.schedule)) for case in cases]
    return Report(
        "megatron_bubble",
        "Megatron's GPTModel under install(): share of all ranks' time that no compute fills",
        rows,
        numbers_of(args) | {"layers": layers},
        [
            "Simulated: with the stages' nominal lengths; transfers take no time. Measured: the recorded steps of a "
            "gloo run, as megatron-pp report reads them. Each layer sleeps, and its real linear layers compute as "
            "well. Own times: simulated with the recorded times of operations and transfers. Target: within 0.03."
        ],
    )


def _rank(rank: int, size: int, cases: list[Case], lengths: Lengths, folder: str) -> None:
    from benchmarks.megatron_stages import record

    for case in cases:
        record(case, lengths, Path(folder) / str(case.schedule))


def _row(case: Case, lengths: Lengths, folder: Path) -> Row:
    spec = PlanSpec(str(case.schedule), case.pp, case.vp or 1, case.microbatches)
    simulated = lengths.simulated(spec)
    findings = analyse(load_run(folder, None))
    measured = findings.measured
    return {
        "schedule": spec.schedule,
        "V": spec.num_chunks,
        "simulated": simulated.bubble_share,
        "measured": measured.bubble_share,
        "measured - simulated": measured.bubble_share - simulated.bubble_share,
        "simulated, own times": findings.predicted.bubble_share,
        "step ms": measured.makespan,
    }

"""Whole steps of Megatron-core's GPTModel whose layers sleep, under Megatron's own schedule and under ``install()``.

The time of a step is that of its compute, and of the waits that the schedule causes. A benchmark without compute does
not show these waits. Schedules that Megatron lacks are compared with its own schedule of the same V.
"""

from __future__ import annotations

import argparse

from benchmarks.bubble import Lengths
from benchmarks.rank_processes import run_ranks
from benchmarks.report import Report, Row, add_options, numbers_of
from benchmarks.rounds import print_progress, slowest_rank, summary
from megatron_pp.plan.ir.spec import OVERLAP, PlanSpec
from testkit.megatron.cases import POLICIES, Case, Model

HELP = "steps of Megatron's GPTModel whose layers sleep: Megatron's own schedules beside ours under install()"
QUICK = {"rounds": 1, "forward_ms": 10.0, "backward_ms": 20.0}
SCHEDULES = {  # schedule -> V and its policies; without chunks warm-up and flush cannot overlap alone
    "1f1b": (None, [policy for policy in POLICIES if policy != "overlap+flush"]),
    "interleaved_1f1b": (2, list(POLICIES)),
    "zb_h1": (None, [OVERLAP]),
    "interleaved_zb": (2, [OVERLAP]),
}
MEGATRONS = ("1f1b", "interleaved_1f1b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lengths = {
        "forward_ms": (20.0, "milliseconds of a rank's whole forward"),
        "backward_ms": (40.0, "milliseconds of its whole backward, half of it for weight gradients"),
    }
    add_options(parser, pp=[2, 4], microbatches=8, **lengths)
    add_options(parser, rounds=(3, "timed steps of each, in turns; one more comes before"), timeout=280.0)
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)


def run(args: argparse.Namespace) -> Report:
    lengths = Lengths(args.forward_ms / 1e3, args.backward_ms / 2e3, args.backward_ms / 2e3)
    rows: list[Row] = []
    for size in args.pp:
        cases = _cases(args, size)
        per_rank = run_ranks(_rank, size, (cases, lengths), timeout=args.timeout)
        rows += [_row(case, lengths, [steps[k] for steps in per_rank]) for k, case in enumerate(cases)]
    return Report(
        "megatron_steps",
        "Steps of Megatron's GPTModel whose layers sleep, under Megatron's own schedules and under install()",
        rows,
        numbers_of(args),
        [
            "Medians of steps that run in turns in the same processes, and the ratio of the fastest steps, because "
            "noise only lengthens a step. Ranks meet before each step. Each chunk has one layer, which sleeps; gloo on "
            "the loopback, messages of 1 KiB. Simulated: our plan, transfers take no time. Without chunks Megatron has "
            "no overlap, so its plain exchange is compared with our overlap. zb_h1 and interleaved_zb are compared "
            "with Megatron's 1F1B and interleaved 1F1B. Target: ours / megatron at most 1.03."
        ],
    )


def _cases(args: argparse.Namespace, size: int) -> list[Case]:
    return [
        Case(
            Model(layers=size * (chunks or 1)), pp=size, vp=chunks, microbatches=args.microbatches, policy=policy,
            schedule=name, variable_shapes=variable, steps=args.rounds,
            deallocate=False,  # 0.16.1 frees outputs before their sends are read when it overlaps
        )
        for name, (chunks, policies) in SCHEDULES.items()
        for policy in policies
        for variable in (False, True)
        if name in args.schedules and policy in args.policies and not (variable and name not in MEGATRONS)
        # With two ranks, each is both neighbours of the other, and Megatron mixes up their shapes in one exchange.
        and not (variable and size == 2 and chunks and not policy.startswith(OVERLAP))
    ]  # fmt: skip


def _rank(rank: int, size: int, cases: list[Case], lengths: Lengths) -> list[dict[str, list[float]]]:
    from benchmarks.megatron_stages import TimedRun, in_turns

    results = []
    for done, case in enumerate(cases, 1):
        results.append(in_turns(case, lambda one: TimedRun(one, lengths), warmup=1))
        print_progress(rank, done, len(cases), f"{case.schedule} {case.label()}", results[-1])
    return results


def _row(case: Case, lengths: Lengths, per_rank: list[dict[str, list[float]]]) -> Row:
    policy = OVERLAP if case.policy.startswith(OVERLAP) else case.policy
    spec = PlanSpec(
        str(case.schedule), case.pp, case.vp or 1, case.microbatches, policy=policy,
        variable_shapes=case.variable_shapes,
    )  # fmt: skip
    steps = slowest_rank(per_rank)
    theirs, ours = (summary(steps[engine], 1e3) for engine in ("megatron", "ours"))
    ratios = {kind: ours[kind] / theirs[kind] for kind in ours}
    simulated = 1e3 * lengths.simulated(spec).makespan
    return {
        "P": case.pp,
        "schedule": spec.schedule,
        "V": spec.num_chunks,
        "policy": case.policy,
        "shapes": "variable" if case.variable_shapes else "fixed",
        "megatron ms": theirs["median"],
        "ours ms": ours["median"],
        "ours / megatron": ratios["median"],
        "of the fastest": ratios["min"],
        "simulated ms": simulated,
        "ours / simulated": ours["median"] / simulated,
    }

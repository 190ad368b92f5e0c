"""The growth with P x V x M of building, verifying and looking up a plan, and of the engine's overhead."""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

from benchmarks.engines import make_step
from benchmarks.overhead import MODEL, bare_model
from benchmarks.report import BenchmarkError, Report, Row
from benchmarks.rounds import summary, timed_rounds
from benchmarks.stages import AddWeight
from benchmarks.stubbed import stubbed_group
from benchmarks.work import Work
from megatron_pp.plan.builder import forget_plans, lowered_plan, verified_plan
from megatron_pp.plan.ir.spec import OVERLAP, PlanSpec
from megatron_pp.plan.verify.verifier import verify

HELP = "plan, verify and cache time, and overhead per virtual microbatch, as P x V x M grows"
SIZES = ("4x2x8", "8x2x32", "8x4x64", "16x4x128", "16x8x256", "32x8x512", "64x8x1024")
QUICK = {"sizes": list(SIZES[:5]), "rounds": 3}
_SHAPE = (1, 1, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="PxVxM")
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace) -> Report:
    return Report(
        "growth",
        "Growth with P x V x M: interleaved 1F1B, overlap",
        [_row(text, args.rounds) for text in args.sizes],
        {"rounds": args.rounds},
        [
            "Once per training run, build makes and lowers the orders of all ranks, and verify checks them. Each step "
            "looks the plan up (cached). Peak MB: the process's largest memory so far, with that of torch.",
            "First use: time until a rank can run the first plan of a run, with M / 2 microbatches. New M: the same "
            "for M microbatches after that.",
        ],
    )


def _row(text: str, rounds: int) -> Row:
    try:
        pipeline_size, chunks, microbatches = (int(number) for number in text.split("x"))
    except ValueError as error:
        raise BenchmarkError(f"--sizes got {text!r}; give P, V and M as in 8x2x32") from error
    work = Work("interleaved_1f1b", pipeline_size, chunks, microbatches, _SHAPE)
    spec = PlanSpec(work.schedule, pipeline_size, chunks, microbatches, pipeline_size, OVERLAP)
    began = time.process_time()
    plan = lowered_plan(spec)
    instructions = sum(map(len, plan.programs))  # reading the programs makes them
    built = time.process_time() - began
    began = time.process_time()
    verify(plan)
    checked = time.process_time() - began
    first, new = _use(replace(spec, num_microbatches=max(1, microbatches // 2))), _use(spec)
    began = time.process_time()
    for _ in range(1000):
        verified_plan(spec)
    cached = (time.process_time() - began) / 1000
    with stubbed_group(1, pipeline_size, "calls") as (group, transport):
        steps = {
            MODEL: bare_model(work, 1),
            "ours": make_step("ours", work, 1, group, lambda stage: AddWeight(_SHAPE), transport),
        }
        seconds = timed_rounds(steps, rounds, clock=time.thread_time)
    each = {name: summary(times, 1e6 / work.virtual_microbatches)["median"] for name, times in seconds.items()}
    forget_plans()
    return {
        "P x V x M": text,
        "instructions": instructions,
        "build s": built,
        "verify s": checked,
        "first use s": first,
        "new M ms": new * 1e3,
        "cached us": cached * 1e6,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "outside us / virtual microbatch": each["ours"] - each[MODEL],
    }


def _use(spec: PlanSpec) -> float:
    """The CPU seconds until a rank can run the plan of ``spec``."""
    began = time.process_time()
    verified_plan(spec)[0].tasks(0)
    return time.process_time() - began

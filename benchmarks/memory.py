"""The peak bytes of a step on every rank, for every engine, beside the prediction of `verify` for our plan."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.engines import available_steps, comparable, surroundings
from benchmarks.megatron_library import versions
from benchmarks.rank_processes import run_ranks
from benchmarks.report import Report, Row, add_options
from benchmarks.stages import TimedStage
from benchmarks.work import Step, Work
from megatron_pp.plan.builder import verified_plan

HELP = "peak live activation bytes of every rank, beside verify's prediction and the peers"


QUICK: dict[str, Any] = {}
SETTINGS = (
    ("1f1b", 2, 1, "overlap"),
    ("1f1b", 4, 1, "overlap"),
    ("1f1b", 4, 1, "plain"),
    ("gpipe", 4, 1, "overlap"),
    ("interleaved_1f1b", 2, 2, "overlap"),
    ("interleaved_1f1b", 4, 2, "overlap"),
    ("interleaved_1f1b", 4, 2, "plain"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = 256, "size of one activation in KiB (default 256)"
    add_options(parser, microbatches=16, kib=size, timeout=(240.0, "seconds for each pipeline size"))


def run(args: argparse.Namespace) -> Report:
    works = [
        Work(schedule, size, chunks, args.microbatches, (args.kib, 1, 256), policy)
        for schedule, size, chunks, policy in SETTINGS
    ]
    peaks: dict[str, list[dict[str, int]]] = {}
    for size in sorted({work.pipeline_size for work in works}):
        some = [work for work in works if work.pipeline_size == size]
        per_rank = run_ranks(_rank, size, (some,), peers=True, timeout=args.timeout)
        peaks |= {work.label(): [rank[place] for rank in per_rank] for place, work in enumerate(some)}
    return Report(
        "memory",
        "Peak live bytes of a step, in activations (one tensor between stages)",
        [row for work in works for row in _rows(work, peaks[work.label()])],
        {"microbatches": args.microbatches, "activation KiB": args.kib, **versions()},
        [
            "The numbers count all bytes of the CPU's allocator in the first step, with the copies that stages make of "
            "inputs and gradients. Stages keep nothing else for their backward.",
            "Predicted: the count of verify for our plan. It includes tensors that are being sent or received, or that "
            "wait between stages.",
            "torch allocates its receive buffers, one per microbatch, in the first step and keeps them.",
        ],
        ["setting", "engine", *(f"rank {r}" for r in range(4)), "remark"],
    )


def _rank(rank: int, size: int, works: list[Work]) -> list[dict[str, int]]:
    """For each work, the peak bytes of each engine's first step."""
    import torch.distributed as dist

    peaks: list[dict[str, int]] = []
    for work in works:
        steps, _ = available_steps(work, rank, dist.group.WORLD, lambda stage: TimedStage(0.0, 0.0))
        peaks.append({})
        for engine in list(steps):
            dist.barrier()
            with surroundings(engine):
                peaks[-1][engine] = peak_bytes(steps.pop(engine))
    return peaks


def peak_bytes(step: Step) -> int:
    """The most bytes that ``step`` had allocated on the CPU at one time, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events: Any = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _rows(work: Work, per_rank: list[dict[str, int]]) -> list[Row]:
    spec = work.spec(group_size=work.pipeline_size, policy=work.policy)
    predicted = [float(peaks.tensors) for peaks in verified_plan(spec)[1].ranks]
    rows = [_row(work, "predicted", predicted, "")]
    for engine in per_rank[0]:
        theirs = comparable(engine, work)
        remark = "" if theirs.policy == work.policy else f"its {theirs.policy}"
        rows.append(_row(work, engine, [rank[engine] / work.message_bytes for rank in per_rank], remark))
    return rows


def _row(work: Work, engine: str, values: list[float], remark: str) -> Row:
    return {
        "setting": work.label(),
        "engine": engine,
        "remark": remark,
        **{f"rank {r}": value for r, value in enumerate(values)},
    }

"""Microseconds outside the model for each virtual microbatch (forward and backward)."""

from __future__ import annotations

import argparse
import functools
import time
from dataclasses import dataclass, field

import torch

from benchmarks.engines import ENGINES, available_steps, surroundings
from benchmarks.megatron_library import versions
from benchmarks.rank_processes import run_ranks
from benchmarks.report import BenchmarkError, Report, Row, add_options
from benchmarks.rounds import slowest_rank, summary, timed_rounds
from benchmarks.stages import AddWeight
from benchmarks.stubbed import STUBS, stubbed_group
from benchmarks.work import PLUG_IN, Step, Work, first_input, loss_of

HELP = "time outside the model per virtual microbatch: transport stubbed, and on real gloo"
MODEL = "the model alone"
OUTSIDE = ("outside us (min)", "outside us (median)")
ON_GLOO = ("gloo outside us", "gloo wall us")
MEASURED = (ENGINES[0], PLUG_IN, *ENGINES[1:])
QUICK = {"rounds": 8, "gloo_rounds": 2}
SETTLING = 1
_SHAPE = (1, 1, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, rounds=(30, "repeats, in turns (default 30)"), microbatches=64, gloo_rounds=5)
    add_options(parser, timeout=(240.0, "seconds for each set of real processes"))
    parser.add_argument("--stub", choices=STUBS, default="calls", help="see benchmarks/stubbed.py")
    over = parser.add_mutually_exclusive_group()
    over.add_argument("--no-gloo", action="store_true", help="leave out the real processes")
    over.add_argument("--only-gloo", action="store_true", help="run only the real processes")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings whose name contains TEXT")


def settings(microbatches: int) -> list[tuple[Work, int]]:
    """(work, measured rank) of each setting. The rank both receives and sends, if the pipeline has such a rank."""

    def work(schedule: str, pipeline_size: int, chunks: int, policy: str) -> Work:
        return Work(schedule, pipeline_size, chunks, microbatches, _SHAPE, policy)

    return [
        (work("interleaved_1f1b", 4, 2, "overlap"), 1),
        (work("interleaved_1f1b", 4, 2, "plain"), 1),
        (work("interleaved_1f1b", 2, 2, "overlap"), 0),
        (work("interleaved_1f1b", 2, 2, "overlap+flush"), 0),
        (work("interleaved_1f1b", 2, 2, "plain"), 0),
        (work("interleaved_1f1b", 2, 2, "batched"), 0),
        (work("1f1b", 4, 1, "overlap"), 1),
        (work("1f1b", 4, 1, "plain"), 1),
        (work("1f1b", 2, 1, "overlap"), 0),
        (work("1f1b", 2, 1, "plain"), 0),
        (work("1f1b", 1, 1, "plain"), 0),
    ]


def run(args: argparse.Namespace) -> Report:
    rows: list[Row] = []
    works = [(work, rank) for work, rank in settings(args.microbatches) if args.only in work.label()]
    if not works:
        raise BenchmarkError(f"no setting of this benchmark has {args.only!r} in its name")
    for work, rank in works:
        rows += [_row(work, e, {}, "") for e in MEASURED] if args.only_gloo else _stubbed(work, rank, args)
    if not args.no_gloo:
        on_gloo = _on_gloo([work for work, _ in works], args)
        rows = [{**row, **on_gloo.get((row["setting"], row["engine"]), {})} for row in rows]
    return Report(
        "overhead",
        "Microseconds outside the model per virtual microbatch (F+B), model x + w on 8 floats",
        _with_ratios(rows),
        {"microbatches": args.microbatches, "rounds": args.rounds, "stub": args.stub, **versions()},
        [
            "Outside: the CPU time of a step, without that of the same forwards and backwards of the bare model in the "
            "same round. Ours / it, plug-in / it: ratios of the medians. Targets: at most 0.5 of Megatron-core's, 0.33 "
            "of torch's.",
            f"{ON_GLOO[0]}: the same for the main thread of the busiest rank, in real processes over gloo. "
            f"{ON_GLOO[1]}: the time of a step in these processes, with compute.",
            "We have two ways to communicate. A peer with only one (Megatron-core without chunks: plain; torch: "
            "overlap) is compared with both.",
        ],
        ["setting", "engine", *OUTSIDE, "ours / it", "plug-in / it", *ON_GLOO, "remark"],
    )


def _stubbed(work: Work, rank: int, args: argparse.Namespace) -> list[Row]:
    with stubbed_group(rank, work.pipeline_size, args.stub) as (group, transport):
        steps, remarks = available_steps(
            work, rank, group, functools.partial(stage_of, work.shape), transport, MEASURED
        )
        steps[MODEL] = bare_model(work, rank)
        seconds = timed_rounds(
            steps, args.rounds, warmup=3, clock=time.thread_time, around=surroundings, settling=SETTLING
        )
    bare = seconds.pop(MODEL)
    scale = 1e6 / work.virtual_microbatches
    rows: list[Row] = [_row(work, MODEL, summary(bare, scale), "")]
    for engine in MEASURED:
        us = _outside(seconds[engine], bare, scale) if engine in seconds else {}
        rows.append(_row(work, engine, us, remarks[engine]))
    return rows


def _outside(whole: list[float], bare: list[float], scale: float) -> dict[str, float]:
    """The time of steps beyond the bare model: the difference of the best rounds, and the median of the differences in
    each round. If the machine changes its speed, it does so for both in a round."""
    differences = [step - alone for step, alone in zip(whole, bare, strict=True)]
    return {"min": (min(whole) - min(bare)) * scale, "median": summary(differences, scale)["median"]}


def _row(work: Work, engine: str, us: dict[str, float], remark: str) -> Row:
    return {
        "setting": work.label(),
        "engine": engine,
        "outside us (min)": us.get("min"),
        "outside us (median)": us.get("median"),
        "remark": remark,
    }


def _with_ratios(rows: list[Row]) -> list[Row]:
    mine = {(row["setting"], row["engine"]): row["outside us (median)"] for row in rows}
    for row in rows:
        theirs = row["outside us (median)"]
        if theirs and theirs > 0 and row["engine"] not in ("ours", PLUG_IN, MODEL):
            row["ours / it"] = mine[row["setting"], "ours"] / theirs
            if row["engine"].startswith("megatron") and (plugged := mine[row["setting"], PLUG_IN]):
                row["plug-in / it"] = plugged / theirs
    return rows


def bare_model(work: Work, rank: int) -> Step:
    """A step of the bare model: as many forwards and backwards as ``rank`` runs. A forward gets data on the first
    stage, and elsewhere an input that needs a gradient. A backward starts from a loss on the last stage, and elsewhere
    from the gradient of an output."""
    model = AddWeight(work.shape)
    first = first_input(work)
    gradient = torch.ones(work.shape)
    stages = [chunk * work.pipeline_size + rank for chunk in range(work.num_chunks)]
    last = work.pipeline_size * work.num_chunks - 1

    def step() -> None:
        for _ in range(work.num_microbatches):
            for stage in stages:
                output = model(first if stage == 0 else torch.ones(work.shape, requires_grad=True))
                if stage == last:
                    loss_of(output).backward()
                else:
                    torch.autograd.backward(output, gradient)

    return step


def _on_gloo(works: list[Work], args: argparse.Namespace) -> dict[tuple[str, str], Row]:
    """(setting, engine) -> microseconds per virtual microbatch in real processes. All settings of a pipeline size run
    in the same processes."""
    found: dict[tuple[str, str], Row] = {}
    for size in sorted({work.pipeline_size for work in works} - {1}):
        some = [work for work in works if work.pipeline_size == size]
        per_rank = run_ranks(_gloo_rank, size, (some, args.gloo_rounds), peers=True, timeout=args.timeout)
        for place, work in enumerate(some):
            scale = 1e6 / work.virtual_microbatches
            outside = slowest_rank([rank[place][0] for rank in per_rank])
            wall = slowest_rank([rank[place][1] for rank in per_rank])
            for engine in outside:
                medians = [summary(times[engine], scale)["median"] for times in (outside, wall)]
                found[work.label(), engine] = dict(zip(ON_GLOO, medians, strict=True))
    return found


@dataclass
class _OnThread:
    """A step that records the CPU time of the calling thread."""

    step: Step
    seconds: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        began = time.thread_time()
        self.step()
        self.seconds.append(time.thread_time() - began)


Times = dict[str, list[float]]


def _gloo_rank(rank: int, size: int, works: list[Work], rounds: int) -> list[tuple[Times, Times]]:
    """Run the works on one real process, all engines in turns. Returns for each work the seconds of this thread beyond
    the bare model in the same round, and the seconds of steps."""
    import torch.distributed as dist

    results = []
    for work in works:
        steps, _ = available_steps(
            work, rank, dist.group.WORLD, functools.partial(stage_of, work.shape), None, MEASURED
        )
        noted = {name: _OnThread(step) for name, step in {**steps, MODEL: bare_model(work, rank)}.items()}
        wall = timed_rounds(noted, rounds, warmup=1, before_each=dist.barrier, around=surroundings, settling=SETTLING)
        timed = slice(1 + SETTLING, None, 1 + SETTLING)  # without the warm-up and settling steps
        bare = noted.pop(MODEL).seconds[timed]
        outside = {
            name: [mine - alone for mine, alone in zip(one.seconds[timed], bare, strict=True)]
            for name, one in noted.items()
        }
        results.append((outside, {name: wall[name] for name in outside}))
    return results


def stage_of(shape: tuple[int, ...], stage: int) -> AddWeight:
    return AddWeight(shape)

"""The cost of recording a trace: CPU time of a step with and without it, with a stubbed transport."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch

from benchmarks.engines import make_step
from benchmarks.overhead import settings
from benchmarks.report import Report, Row, add_options, numbers_of
from benchmarks.rounds import timed_rounds
from benchmarks.stages import AddWeight
from benchmarks.stubbed import StubTransport, stubbed_group
from benchmarks.work import Step, Work
from megatron_pp.comm.collectives import Done
from megatron_pp.config.setting_names import variable_of

HELP = "CPU time that recording a trace adds to a step"
QUICK = {"rounds": 15}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share = 10.0, "milliseconds of F+B of one microbatch and chunk, of which the share is computed"
    add_options(parser, rounds=(30, "repeats, in turns (default 30)"), microbatches=64, compute_ms=share)


def run(args: argparse.Namespace) -> Report:
    rows = [_row(work, rank, args) for work, rank in settings(args.microbatches) if work.pipeline_size > 1]
    return Report(
        "tracing",
        "What recording a trace adds to a step",
        rows,
        numbers_of(args),
        [
            "Medians of the CPU time of one rank's step, transport stubbed, model x + w on 8 floats, per virtual "
            "microbatch (F+B). They include writing the step to the file. Share: of the compute time above.",
            "Target: share at most 0.01.",
        ],
    )


def _row(work: Work, rank: int, args: argparse.Namespace) -> Row:
    with (
        stubbed_group(rank, work.pipeline_size, "calls") as (group, _),
        tempfile.TemporaryDirectory() as folder,
    ):
        transport = _ReceivesZeros(rank, work.pipeline_size)
        off = make_step("ours", work, rank, group, lambda stage: AddWeight(work.shape), transport)
        on = _traced(make_step("ours", work, rank, group, lambda stage: AddWeight(work.shape), transport), folder)
        steps = {"off": off, "on": on}
        seconds = timed_rounds(steps, args.rounds, warmup=2, clock=time.thread_time)
    each = {name: statistics.median(times) * 1e6 / work.virtual_microbatches for name, times in seconds.items()}
    added = each["on"] - each["off"]
    return {
        "setting": work.label(),
        "off us": each["off"],
        "on us": each["on"],
        "added us": added,
        "share": added / (args.compute_ms * 1e3),
    }


class _ReceivesZeros(StubTransport):
    """A stub whose receives of whole numbers give zeros: ranks compare their clocks by them."""

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Done:
        return super().irecv(tensor if tensor.is_floating_point() else tensor.zero_(), peer, channel)


def _traced(step: Step, folder: str) -> Step:
    def run() -> None:
        os.environ.update({variable_of("trace_dir"): folder, variable_of("trace_steps"): "1-999999999"})
        try:
            step()
        finally:
            del os.environ[variable_of("trace_dir")], os.environ[variable_of("trace_steps")]

    return run

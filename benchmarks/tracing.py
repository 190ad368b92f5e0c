"""Measures what recording a trace costs: the CPU time of a step with a trace, and of the same step without one. The
transport is stubbed, so transfers take no time."""

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
    compute = (
        10.0,
        "milliseconds of a forward and backward of one microbatch through one chunk; the share is of this time",
    )
    add_options(parser, rounds=(30, "repeats, in turns (default 30)"), microbatches=64, compute_ms=compute)


def run(args: argparse.Namespace) -> Report:
    rows = [_row(work, rank, args) for work, rank in settings(args.microbatches) if work.pipeline_size > 1]
    return Report(
        "tracing",
        "What recording a trace adds to a step",
        rows,
        numbers_of(args),
        [
            "Off and on: the median CPU time of one rank's step without and with a trace, per virtual microbatch "
            "(F+B). The transport is stubbed, and the model is x + w on 8 floats. On includes the time to write the "
            "step to the file. Share: the added time over the compute time above.",
            "Target: share at most 0.01.",
        ],
    )


def _row(work: Work, rank: int, args: argparse.Namespace) -> Row:
    """Measure the steps of ``rank`` without and with a trace, in turns."""
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
    """A stub transport whose receives of integers give zeros. Ranks compare their clocks by sending integers, and here
    no other rank sends any."""

    def irecv(self, tensor: torch.Tensor, peer: int, channel: str) -> Done:
        return super().irecv(tensor if tensor.is_floating_point() else tensor.zero_(), peer, channel)


def _traced(step: Step, folder: str) -> Step:
    """``step`` with tracing turned on while it runs. The trace is written into ``folder``."""

    def run() -> None:
        os.environ.update({variable_of("trace_dir"): folder, variable_of("trace_steps"): "1-999999999"})
        try:
            step()
        finally:
            del os.environ[variable_of("trace_dir")], os.environ[variable_of("trace_steps")]

    return run

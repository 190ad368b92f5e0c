"""First steps of fresh processes, in which CUDA has loaded no kernel. They run under the default plan, which posts
receives so that no operation that waits for the device can hang, and under ``device_sync=False``, whose plans may hang.

The explanation of the first hang on a GPU is: ``device_sync=False`` hangs if two first launches wait for each other's
messages, and the default plan never hangs. This part can refute both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gpu_day import outside, ranks
from gpu_day.bench import Bench
from megatron_pp.testing.toy import TOY_SCHEDULES

MODES: dict[str, dict[str, Any]] = {"default": {}, "device_sync=False": {"device_sync": False}}
TIMEOUTS = {"p2p_timeout": 12.0, "compute_timeout": 15.0}
SECONDS = 60.0  # limit of one run, with the start of its processes
AT_ONCE = 4  # runs at the same time
NOT_REACHED = "not reached"
# Schedules that hang on a model of the device.
_FIRST = ("gis_h", "pipe_offload", "v_min", "1f1b_v", "1f1b", "interleaved_1f1b")


def run(bench: Bench, size: int = 2) -> None:
    names = sorted(bench.sizes.schedules or TOY_SCHEDULES, key=lambda name: name not in _FIRST)
    jobs = [(name, mode) for mode in MODES for name in names]
    # On a CPU processes are forked, which does not work with threads.
    workers = AT_ONCE if bench.machine.has_gpus else 1
    found = outside.at_once([partial(_said, bench, size, *job) for job in jobs], workers)
    said = dict(zip(jobs, found, strict=True))
    reached = [name for name in names if said[name, "default"] != NOT_REACHED]
    bad = {name: said[name, "default"] for name in reached if said[name, "default"] != ranks.EQUAL}
    what = (
        f"P={size}, default plan: first steps of {len(reached)} of {len(names)} schedules end with one process's bits"
    )
    bench.check(bool(reached) and not bad, what + (f"; not these: {bad}" if bad else ""))
    hung = sum(text not in (ranks.EQUAL, NOT_REACHED) for (_, mode), text in said.items() if mode != "default")
    bench.numbers(**{mode: {name: said[name, mode] for name in names} for mode in MODES})
    bench.text(f"P={size}, device_sync=False, which may hang: {hung} schedules did not end with one process's bits.")
    bench.table(["schedule", *MODES], [[name, *(said[name, mode] for mode in MODES)] for name in names])


def _said(bench: Bench, size: int, name: str, mode: str) -> str:
    """The outcome of the first step of fresh processes."""
    if bench.left < 2.0:
        return NOT_REACHED
    fields = {**ranks.OVERLAP, **MODES[mode], **TIMEOUTS}
    (steps,) = ranks.steps_of(
        (name,), ("overlap",), 2 * size, bench.sizes.seq_length, bench.sizes.hidden, **fields
    ).items()
    seconds = min(SECONDS, bench.left)
    return ranks.outcome(lambda: bench.ranks(ranks.differences, dict([steps]), size=size, seconds=seconds))

"""``--trace STEPS``: the pipeline's timeline of some training steps, beside the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from examples.gpt.errors import ArgumentError
from megatron_pp.errors import PlanError, ScheduleInputError
from megatron_pp.plan.files import write_whole
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.recorder import chosen_steps, flush_traces
from megatron_pp.tracing.report import listed, run_page, run_trace
from megatron_pp.tracing.run import load_run, run_names

TRACES = "traces"
PAGE = "timeline.html"
CHROME = "timeline.json"


def check_trace_steps(text: str) -> None:
    """Raises ArgumentError unless ``text`` lists steps."""
    try:
        chosen_steps(text)
    except ScheduleInputError:
        raise ArgumentError(f"--trace is {text!r}; it must list steps, as in 3,10-12") from None


def switch_on(config: Any, steps: str, folder: Path, steps_done: int) -> None:
    """Have the schedules of ``config`` record ``steps``, which are counted as the metrics count them."""
    config.trace_dir = str(folder / TRACES)
    config.trace_steps = steps
    config.trace_first_step = steps_done + 1


def merge(folder: Path) -> str:
    """Put the newest run's traces into one page; what to tell the user about it. Collective: all ranks write first."""
    flush_traces()
    dist.barrier()
    if dist.get_rank() != 0:
        return ""
    names = run_names(folder / TRACES)
    if not names:
        return "no step of --trace was run"
    try:
        traced = load_run(folder / TRACES, names[-1])
        write_whole(folder / PAGE, run_page(analyse(traced), traced))
        write_whole(folder / CHROME, run_trace(traced))
    except PlanError as error:
        return f"the traces could not be put together: {error}"
    return (
        f"timeline of step(s) {listed(traced.steps)}: open {folder / PAGE} in a browser, "
        f"or {folder / CHROME} at https://ui.perfetto.dev; in numbers: megatron-pp report {folder / TRACES}"
    )

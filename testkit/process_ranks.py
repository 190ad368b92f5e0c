"""Ranks as processes on gloo, with the arguments of ``step_runs.pipeline``, which runs ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.testing.toy import ToyData, toy_config
from testkit.processes import run_processes
from testkit.thread_runs.step_runs import Rank


def rank_of(
    num_chunks: int, microbatches: int, *, group: Any = None, data: ToyData | None = None, **fields: Any
) -> Rank:
    """The rank of this process in the pipeline over ``group``, by default over all processes. ``fields``: of the
    config."""
    group = group or dist.group.WORLD
    config = toy_config(virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None, **fields)
    data = data or ToyData(microbatches, variable=fields.get("variable_seq_lengths", False))
    return Rank(group.rank(), config, communicator_for(group, config), num_chunks, data)


def pipeline(
    size: int,
    num_chunks: int,
    microbatches: int,
    body: Callable[..., Any],
    *args: Any,
    data: ToyData | None = None,
    timeout: float = 60.0,
    patience: float = 5.0,
    **fields: Any,
) -> list[Any]:
    """Run ``body(rank, *args)``, a function of a module, in each process. Returns the results. Raises as
    ``run_processes`` does."""
    job = body, num_chunks, microbatches, data, fields, args
    return run_processes(_rank_main, size, job, timeout=timeout, patience=patience, start_method="forkserver")


def _rank_main(rank: int, size: int, body: Callable[..., Any], chunks: int, count: int, *given: Any) -> Any:
    data, fields, args = given
    try:
        return body(rank_of(chunks, count, data=data, **fields), *args)
    finally:
        close_communicators()

"""Ranks as processes, forked from one that has imported torch and the peers; the import takes 10 s."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def run_ranks(
    function: Callable[..., Any], size: int, args: tuple[Any, ...], peers: bool = False, **options: Any
) -> list[Any]:
    """`tests.harness.processes.run_processes`, with its options: ``function(rank, size, *args)`` on every rank.

    ``peers``: import Megatron-core and the checkout before the ranks are forked.
    """
    from tests.harness.processes import run_processes

    multiprocessing.set_forkserver_preload(["benchmarks.engine_ours", *(["benchmarks.preloaded"] if peers else [])])
    return run_processes(function, size, args, start_method="forkserver", **options)

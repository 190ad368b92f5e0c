"""Ranks that are threads, guards of two ranks, and a store that can fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron_pp.errors import CommunicatorClosedError
from megatron_pp.faults.guard import FaultGuard
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.threads import run_ranks

Outcome = BaseException | None


def raised_by(size: int, main: Callable[[int], None], seconds: float = 30.0) -> list[Outcome]:
    """What ``main(rank)`` raises on each rank, which is a thread."""

    def run(rank: int) -> Outcome:
        try:
            main(rank)
        except BaseException as error:
            return error
        return None

    return run_ranks(size, run, timeout=seconds)


def new_source(size: int = 2) -> Any:
    """What stands for an executor."""
    return SimpleNamespace(plan=build_plan(PlanSpec("1f1b", size, 1, 4)), position=0, aborted=threading.Event())


def new_guard(
    rank: int, store: Any, pipeline: str = "p", timeout: float = 30.0, size: int = 2, **more: Any
) -> tuple[FaultGuard, Any]:
    """A rank's guard, and what stands for its executor. ``more``: of the guard."""
    source = new_source(size)
    more = {"abort": source.aborted.set, "global_rank": rank + (10 if pipeline != "p" else 0), **more}
    return FaultGuard(store, pipeline, rank, size, timeout, **more), source


def wait_until_aborted(source: Any) -> None:
    assert source.aborted.wait(10.0), "the communicator was not aborted"
    raise CommunicatorClosedError("aborted")


class Unreachable:
    """A store whose server is gone."""

    def __init__(self) -> None:
        self.gone = False
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.gone:
                raise dist.DistNetworkError("connection reset")
            return getattr(self._store, name)(*args)

        if name in ("clone", "has_extended_api"):
            raise AttributeError(name)
        return call

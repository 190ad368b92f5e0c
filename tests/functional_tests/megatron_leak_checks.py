"""Steps under ``install()`` that fail on a rank, and what stays of them; for ``test_nothing_kept_under_megatron.py``.

The checks run on ranks, in the processes of testkit/megatron/runner.py.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.comm.wait_handle import WaitHandle
from megatron_pp.runtime.communicators import close_communicators
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.step import Step
from testkit.megatron import lab
from testkit.megatron.cases import Case

STEP = (Step, PlanExecutor, WaitHandle, TracebackType)
FAILS_AT = 3  # the call that fails, among those of a layer on the rank that fails, in the second step


class InjectedError(Exception):
    """An error that a user's code raises."""


def left_of_a_forward(case: Case) -> dict[str, Any]:
    """Let the last rank's layer raise in a forward, and return what is left."""
    return _left(case, functools.partial(_watch, backward=False))


def left_of_a_backward(case: Case) -> dict[str, Any]:
    """Let the last rank's layer raise in a backward, and return what is left."""
    return _left(case, functools.partial(_watch, backward=True))


def _left(case: Case, watch: Any) -> dict[str, Any]:
    """Return this rank's error, what its step leaves, by kind, and the threads left after communicators are closed."""
    gc.collect()
    gc.freeze()
    gc.disable()
    seen: list[StorageWeakRef] = []
    error = _error_of(case, watch, seen)
    left = Counter(type(one).__name__ for one in gc.get_objects() if issubclass(type(one), STEP))
    left["memory of activations"] = sum(not one.expired() for one in seen)
    close_communicators()
    until = time.monotonic() + 8.0
    while (threads := _threads()) and time.monotonic() < until:
        time.sleep(0.05)
    return {"error": error, "left": dict(+left), "threads": threads, "seen": len(seen)}


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("megatron_pp")]


def _error_of(case: Case, watch: Any, seen: list[StorageWeakRef]) -> str:
    with lab.engine(case):
        run = lab.Run(case)
        run.config.p2p_timeout = 20.0
        fails = lab.parallel_state.get_pipeline_model_parallel_rank() == case.pp - 1
        try:
            run.step(0)
            watch(run, seen, fails)
            run.step(1)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for chunk in run.chunks:
                chunk.module.set_input_tensor(None)  # Megatron's model keeps its last input
    return "no error"


def _watch(run: lab.Run, seen: list[StorageWeakRef], fails: bool, backward: bool) -> None:
    """Append the memory of all inputs and outputs of layers to ``seen``; on the rank that ``fails``, raise."""
    calls = iter(range(FAILS_AT))

    def fire(grad: Any = None) -> None:
        raise InjectedError("injected fault")

    def note(layer: Any, given: Any, named: Any, made: Any) -> None:
        tensors = [one for one in (*given, *named.values(), *made) if isinstance(one, torch.Tensor)]
        seen.extend(StorageWeakRef(one.untyped_storage()) for one in tensors if one.requires_grad)
        if fails and next(calls, None) is None:
            made[0].register_hook(fire) if backward else fire()

    for chunk in run.chunks:
        for layer in (one for one in chunk.modules() if type(one).__name__ == "TransformerLayer"):
            layer.register_forward_hook(note, with_kwargs=True)

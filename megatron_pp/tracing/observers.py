"""What watches a step: around its instructions (``Observer``), and around its phases (``StepObserver``)."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import Plan


class Observer(Protocol):
    """Around each instruction of a step."""

    def begin(self, at: Instruction) -> None: ...

    def end(self, at: Instruction) -> None: ...


@runtime_checkable
class Recording(Observer, Protocol):
    """An observer that takes part before the first instruction and after the last one, with the channels of all ranks
    prepared."""

    def start(self) -> None: ...

    def finish(self) -> None: ...


class StepObserver:
    """What a setting adds to a step, by the phase where it does so; each method does nothing here. A module that
    a step loads for a setting has a function ``step_observer``, which is given the StepRequest and makes one, or
    returns None. ``step`` is the Step."""

    def next_plan(self, step: Any, plan: Plan) -> Plan:
        """The plan that the step runs: ``plan``, which its settings ask for, or what replaces it."""
        return plan

    def observers(self, step: Any, plan: Plan, size: float) -> Sequence[Observer]:
        """What watches the instructions. ``size``: bytes of an activation."""
        return ()

    def watch(self, engine: Any) -> None:
        """The engine that runs the step, before it does."""

    def after_step(self, step: Any, plan: Plan, guard: Any) -> None:
        """Gradients are finalised; ``guard`` is the fault guard of the step, or None."""

    def description(self, plan: Plan, splits: bool) -> dict[str, str]:
        """What else ranks have to agree on, as text by name. ``splits``: whether the model splits its backward."""
        return {}


def nested(*candidates: Observer | None) -> Observer | None:
    """One observer for all that are not None; None if all are."""
    found = [one for one in candidates if one is not None]
    return _Nested(found) if len(found) > 1 else next(iter(found), None)


@dataclass
class _Nested:
    """Observers, the later ones within the earlier ones."""

    observers: Sequence[Observer]

    def begin(self, at: Instruction) -> None:
        for one in self.observers:
            one.begin(at)

    def end(self, at: Instruction) -> None:
        for one in reversed(self.observers):
            one.end(at)


def message_bytes(shapes: Any, dtype: torch.dtype | None) -> float:
    """Bytes of a message of ``shapes`` (one, or a list of them) in ``dtype``; 0 if they are not known."""
    if shapes is None or dtype is None:
        return 0.0
    if all(isinstance(n, int) for n in shapes):
        return float(math.prod(shapes)) * dtype.itemsize
    return sum(message_bytes(shape, dtype) for shape in shapes)


class ProfilerRanges:
    """An observer of the engine that opens ``range_of(name)`` around each instruction, named as it prints: ``F0.3``,
    ``WAIT_F1.0``, ``[SEND_F0.1 RECV_B0.0]``."""

    def __init__(self, range_of: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._range_of = range_of
        self._open: list[AbstractContextManager[Any]] = []

    def begin(self, at: Instruction) -> None:
        self._open.append(self._range_of(str(at)))
        self._open[-1].__enter__()

    def end(self, at: Instruction) -> None:
        self._open.pop().__exit__(None, None, None)


def ranges_if_profiling() -> ProfilerRanges | None:
    """The observer of the step that starts now; None where no profiler runs. ``torch.profiler.profile`` (also on the
    CPU) and ``torch.autograd.profiler.emit_nvtx`` are detected; for nsys, which torch cannot detect, MEGATRON_PP_NVTX=1
    is set. Called once a step."""
    if torch.autograd._profiler_enabled():
        return ProfilerRanges(torch.autograd.profiler.record_function)
    if os.environ.get("MEGATRON_PP_NVTX") == "1" and torch.cuda.is_available():
        return ProfilerRanges(torch.cuda.nvtx.range)
    return None

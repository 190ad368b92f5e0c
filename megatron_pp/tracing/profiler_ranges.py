"""Shows the instructions of a step as ranges in a profiler."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_pp.plan.ir.instruction import Instruction


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


def profiler_ranges() -> ProfilerRanges:
    """The observer that opens ranges in torch's profiler if it runs, or else NVTX ranges."""
    if torch.autograd._profiler_enabled():
        return ProfilerRanges(torch.autograd.profiler.record_function)
    return ProfilerRanges(torch.cuda.nvtx.range)

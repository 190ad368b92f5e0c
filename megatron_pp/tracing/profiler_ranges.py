"""A range in the profile for every instruction, named as it prints: ``F0.3``, ``WAIT_F1.0``, ``[SEND_F0.1 RECV_B0.0]``.

Ranges are opened only while a profiler runs: ``torch.profiler.profile`` (also on the CPU) and
``torch.autograd.profiler.emit_nvtx`` are detected; for nsys, which torch cannot detect, set ``MEGATRON_PP_NVTX=1``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_pp.plan.instruction import Instruction


class ProfilerRanges:
    """An observer of the engine that opens ``range_of(name)`` around each instruction."""

    def __init__(self, range_of: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._range_of = range_of
        self._open: list[AbstractContextManager[Any]] = []

    def begin(self, at: Instruction) -> None:
        self._open.append(self._range_of(str(at)))
        self._open[-1].__enter__()

    def end(self, at: Instruction) -> None:
        self._open.pop().__exit__(None, None, None)


def ranges_if_profiling() -> ProfilerRanges | None:
    """The observer of the step that starts now; None where no profiler runs. Called once a step."""
    if torch.autograd._profiler_enabled():
        return ProfilerRanges(torch.autograd.profiler.record_function)
    if os.environ.get("MEGATRON_PP_NVTX") == "1" and torch.cuda.is_available():
        return ProfilerRanges(torch.cuda.nvtx.range)
    return None

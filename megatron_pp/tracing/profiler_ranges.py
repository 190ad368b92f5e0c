"""A range in the profile for every instruction, named as it prints: ``F0.3``, ``WAIT_F1.0``, ``[SEND_F0.1 RECV_B0.0]``.

Ranges are opened only while a profiler runs: ``torch.profiler.profile`` (also on the CPU) and
``torch.autograd.profiler.emit_nvtx`` are detected; for nsys, which torch cannot detect, set ``MEGATRON_PP_NVTX=1``.
"""

from __future__ import annotations

import os

import torch

from megatron_pp.plan.instruction import Instruction


class ProfilerRanges:
    """An observer of the engine that opens a ``record_function`` range around each instruction."""

    def __init__(self) -> None:
        self._open: list[torch.autograd.profiler.record_function] = []

    def begin(self, at: Instruction) -> None:
        self._open.append(torch.autograd.profiler.record_function(str(at)))
        self._open[-1].__enter__()

    def end(self, at: Instruction) -> None:
        self._open.pop().__exit__(None, None, None)


class NvtxRanges:
    """The same as NVTX ranges, for a profiler outside torch."""

    def begin(self, at: Instruction) -> None:
        torch.cuda.nvtx.range_push(str(at))

    def end(self, at: Instruction) -> None:
        torch.cuda.nvtx.range_pop()


def ranges_if_profiling() -> ProfilerRanges | NvtxRanges | None:
    """The observer of the step that starts now; None where no profiler runs. Called once a step."""
    if torch.autograd._profiler_enabled():
        return ProfilerRanges()
    if os.environ.get("MEGATRON_PP_NVTX") == "1" and torch.cuda.is_available():
        return NvtxRanges()
    return None

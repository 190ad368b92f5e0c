"""A range in the profile for every instruction, named as it prints: ``F0.3``, ``WAIT_F1.0``, ``[SEND_F0.1 RECV_B0.0]``.

Ranges exist while somebody profiles and cost nothing otherwise: under ``torch.profiler.profile`` (also on the CPU)
and ``torch.autograd.profiler.emit_nvtx``, found by themselves; under nsys, which torch does not know of, where the
environment has ``MEGATRON_PP_NVTX=1``.
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
        """Before the instruction."""
        opened = torch.autograd.profiler.record_function(str(at))
        opened.__enter__()
        self._open.append(opened)

    def end(self, at: Instruction) -> None:
        """After it, also when it raised."""
        self._open.pop().__exit__(None, None, None)


class NvtxRanges:
    """The same as NVTX ranges, for a profiler outside of torch."""

    def begin(self, at: Instruction) -> None:
        """Before the instruction."""
        torch.cuda.nvtx.range_push(str(at))

    def end(self, at: Instruction) -> None:
        """After it, also when it raised."""
        torch.cuda.nvtx.range_pop()


def ranges_if_profiling() -> ProfilerRanges | NvtxRanges | None:
    """What marks the instructions of the step that starts now; None where nobody profiles. Asked once a step."""
    if torch.autograd._profiler_enabled():
        return ProfilerRanges()
    if os.environ.get("MEGATRON_PP_NVTX") == "1" and torch.cuda.is_available():
        return NvtxRanges()
    return None

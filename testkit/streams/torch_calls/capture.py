"""CUDA graphs on virtual devices. Captured operations run when they are issued, and a replay is one operation.

While a stream is captured, calls that query the device or wait for it are errors, and end the capture. This holds for
the thread that captures. If the mode is ``global`` (torch's default), it also holds for other threads, unless they are
in the relaxed mode. For events that were recorded in the capture it holds for every thread (cudaStreamBeginCapture and
cudaThreadExchangeStreamCaptureMode in the reference of CUDA's runtime).

A capture allocates from the pool of its graph. A replay uses the same addresses again, even if another graph has them
now: memory goes from one graph to graphs that are captured later. So the graphs of one pool must be replayed in the
order of capture (torch.cuda.graph; Megatron's ``_CudagraphGlobalRecord``).
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import torch

from testkit.streams.device import VirtualDevice, current_device
from testkit.streams.host_process import Capture, HostProcess, this_process
from testkit.streams.memory import Use

_pools = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    """``torch.cuda.graph_pool_handle``."""
    return 0, next(_pools)


class CUDAGraph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._uses: list[Use] = []
        self._ends = ExitStack()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        _process().capture = Capture(capture_error_mode)
        device = _device()
        self._ends.enter_context(device.allocating(graph_pool_handle() if pool is None else pool))
        device.captured = self._uses

    def capture_end(self) -> None:
        """End the capture. Raises RuntimeError if a call during the capture was not allowed."""
        _device().captured = None
        self._ends.close()
        process = _process()
        capture, process.capture = process.capture, None
        if capture is not None and capture.broken_by:
            raise RuntimeError(
                f"CUDA error: operation failed due to a previous error during capture ({capture.broken_by})"
            )

    def replay(self) -> None:
        device = _device()
        lane = device.stream_step("a graph")
        for use in self._uses:
            device.use(use, lane, "a graph")
        device.log.issued(device.rank)


def give_back(tensor: torch.Tensor) -> None:
    """Let graphs that are captured later have the memory of ``tensor``. Graphs that know its address still use it, as
    with Transformer Engine's ``make_weak_ref``."""
    _device().give_back(tensor)


def _device() -> VirtualDevice:
    device = current_device()
    assert device is not None, "graphs belong to the threads of ranks"
    return device


def _process() -> HostProcess:
    process = this_process()
    assert process is not None, "graphs belong to the threads of ranks"
    return process


def is_capturing() -> bool:
    """Whether the current stream of this thread is being captured."""
    process = this_process()
    return process is not None and process.is_capturing()

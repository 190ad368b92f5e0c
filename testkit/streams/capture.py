"""CUDA graphs on virtual devices: what is captured runs as it is issued, and a replay is one operation.

While a stream is captured, calls that ask the device or wait for it are errors, and end the capture: in the thread that
captures, in others too where the mode is ``global`` (torch's default), unless these have said that they are relaxed;
for events that were recorded in the capture, in every thread (cudaStreamBeginCapture and
cudaThreadExchangeStreamCaptureMode in the reference of CUDA's runtime).

What a capture allocates comes from the pool of its graph. A replay uses these addresses again, whatever has been given
them since: memory goes from one graph to the graphs that are captured later, so those of one pool have to be replayed
in the order of capture (torch.cuda.graph; Megatron's ``_CudagraphGlobalRecord``).
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
        """Raises RuntimeError where a call in between was not allowed."""
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
    """Graphs that are captured later may have the memory of ``tensor``, though those that know its address go on to use
    it, as with Transformer Engine's ``make_weak_ref``."""
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
    """Whether the current stream of this thread is captured."""
    process = this_process()
    return process is not None and process.is_capturing()

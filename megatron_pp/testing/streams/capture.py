"""CUDA graphs on virtual devices: what is captured runs as it is issued, and a replay is one operation.

While a stream is captured, calls that ask the device or wait for it are errors, and end the capture: in the thread that
captures, in others too where the mode is ``global`` (torch's default), unless these have said that they are relaxed;
for events that were recorded in the capture, in every thread (cudaStreamBeginCapture and
cudaThreadExchangeStreamCaptureMode in the reference of CUDA's runtime).
"""

from __future__ import annotations

from typing import Any

from megatron_pp.testing.streams.device import current_device
from megatron_pp.testing.streams.host_process import Capture, HostProcess, this_process


class CUDAGraph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        """Nothing is captured yet."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        _process().capture = Capture(capture_error_mode)

    def capture_end(self) -> None:
        """Raises RuntimeError where a call in between was not allowed."""
        process = _process()
        capture, process.capture = process.capture, None
        if capture is not None and capture.broken_by:
            raise RuntimeError(
                f"CUDA error: operation failed due to a previous error during capture ({capture.broken_by})"
            )

    def replay(self) -> None:
        device = current_device()
        assert device is not None
        device.stream_step("a graph")


def _process() -> HostProcess:
    process = this_process()
    assert process is not None, "graphs belong to the threads of ranks"
    return process


def is_capturing() -> bool:
    """Whether the current stream of this thread is captured."""
    process = this_process()
    return process is not None and process.is_capturing()

"""How much of a step a rank spends computing; the rest is its bubble, with the communication that is not hidden.

``ComputeTimers`` is what the schedules call ``config.timers``: they start and stop ``forward-compute`` and
``backward-compute`` around each model chunk's work, and the store of weight gradients ``weight-compute`` around what
was put off.
"""

from __future__ import annotations

import time

import torch


class ComputeTimers:
    """Adds up the time inside forward and backward passes of one step, weight gradients that were put off among them.

    On the CPU it is the host's time. On a GPU it is the stream's, between events; a wait for a message lies before the
    first of them.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._watches = {
            name: _CudaStopwatch() if device.type == "cuda" else _HostStopwatch()
            for name in ("forward-compute", "backward-compute", "weight-compute")
        }
        self._ignored = _HostStopwatch()

    def __call__(self, name: str, log_level: int | None = None) -> _HostStopwatch | _CudaStopwatch:
        """The stopwatch called ``name``; one that nobody reads for other names. ``log_level`` is Megatron's, unused."""
        return self._watches.get(name, self._ignored)

    def take_seconds(self) -> float:
        """Seconds of compute since the last call."""
        return sum(watch.take_seconds() for watch in self._watches.values())


class _HostStopwatch:
    def __init__(self) -> None:
        self._started = 0.0
        self._seconds = 0.0

    def start(self, barrier: bool = False) -> None:
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        self._seconds += time.perf_counter() - self._started

    def take_seconds(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _CudaStopwatch:
    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, barrier: bool = False) -> None:
        span = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        span[0].record()
        self._spans.append(span)

    def stop(self, barrier: bool = False) -> None:
        self._spans[-1][1].record()

    def take_seconds(self) -> float:
        spans, self._spans = self._spans, []
        if spans:
            spans[-1][1].synchronize()
        return sum(start.elapsed_time(stop) for start, stop in spans) / 1000.0

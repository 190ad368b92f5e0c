"""How fast memory is copied between a device and the host."""

from __future__ import annotations

import statistics
import time

import torch

_BYTES = 16 * 2**20
_COPIES = 5


def copy_rates(device: torch.device) -> tuple[str, float, float]:
    """What is copied, in words, and bytes per second to the host and back; on a CPU, of a copy in memory. Waits for the
    device."""
    on_device = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=True)
        return "device and pinned host memory", _rate(host, on_device), _rate(on_device, host)
    rate = _rate(torch.zeros_like(on_device), on_device)
    return "two places in the memory of the CPU", rate, rate


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second, the median; the first copy warms up."""
    times = []
    for _ in range(1 + _COPIES):
        began = time.perf_counter()
        target.copy_(source)  # returns when it is done
        times.append(time.perf_counter() - began)
    return _BYTES / statistics.median(times[1:])

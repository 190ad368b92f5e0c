"""Kernels that a process has not loaded. The first launch of such a kernel waits until the device is idle, and so for
all receives that are posted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from megatron_pp.testing.toy import ToyBlock

# Kernels of torch's own binaries. Others, such as ``torch.special.i0e``, are compiled at their first launch.
_FUNCTIONS = (
    *("erfinv", "lgamma", "expm1", "log1p", "acosh", "asinh", "atanh", "sinh", "cosh", "tan", "atan", "erfc", "erf"),
    *("log2", "log10", "asin", "acos", "frac", "trunc", "ceil"),
)
_DTYPES = (torch.float32, torch.float64)


class Launches:
    """Launches kernels that nothing else in the process runs, each of them once. ``launch()`` takes the next kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels = kernels()

    def launch(self) -> None:
        function, dtype = next(self._kernels)
        function(torch.full((8,), 0.5, dtype=dtype, device=self._device))


def kernels() -> Iterator[tuple[Callable[[torch.Tensor], Any], torch.dtype]]:
    """The kernels, in an order that is the same in every process."""
    for dtype, name in product(_DTYPES, _FUNCTIONS):
        yield getattr(torch, name), dtype


class LaunchingBlock(ToyBlock):
    """A stage that launches new kernels in some forwards and backwards. ``forwards`` and ``backwards`` are their
    numbers, from 0."""

    def __init__(
        self, stage: int, hidden: int, launches: Launches, forwards: frozenset[int], backwards: frozenset[int]
    ) -> None:
        super().__init__(stage, hidden)
        self.launches, self.forwards, self.backwards = launches, forwards, backwards
        self.done = [0, 0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._pass(0, self.forwards)
        output = super().forward(x)
        output.register_hook(self._in_backward)
        return output

    def _in_backward(self, gradient: torch.Tensor) -> None:
        self._pass(1, self.backwards)

    def _pass(self, which: int, chosen: frozenset[int]) -> None:
        if self.done[which] in chosen:
            self.launches.launch()
        self.done[which] += 1

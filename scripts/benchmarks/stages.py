"""The models that benchmarks run: one that does nothing, and one whose compute takes a known time."""

from __future__ import annotations

import time
from typing import Any

import torch


class AddWeight(torch.nn.Module):
    """`x + w`: as little compute as a stage with a parameter can have. Keeps nothing for its backward."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class TimedStage(torch.nn.Module):
    """A stage whose forward and backward take as long as told, by sleeping: cores stay free for the transfers.

    Copies that a stage makes (its output, the gradient of its input) are counted into that time.
    """

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seconds = (forward_seconds, backward_seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Timed.apply(x, self.weight, self.seconds)
        return output


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: tuple[float, float]) -> torch.Tensor:
        ctx.backward_seconds = seconds[1]
        until = time.perf_counter() + seconds[0]
        output = x.clone()
        sleep_until(until)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        until = time.perf_counter() + ctx.backward_seconds
        given = grads[0].clone()
        sleep_until(until)
        return given, given.new_zeros(1), None


def sleep_until(when: float) -> None:
    left = when - time.perf_counter()
    if left > 0:
        time.sleep(left)

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
    """A stage whose forward and backward take given times, by sleeping: cores stay free for the transfers.

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


class SplitTimedStage(torch.nn.Module):
    """A TimedStage whose backward is in two halves: it queues its weight gradients, as Transformer Engine's layers do,
    and ``backward_dw()`` computes (sleeps) them, oldest first. ``split_weight_grad`` supports such layers.
    """

    def __init__(self, forward_seconds: float, input_seconds: float, weight_seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seconds = (forward_seconds, input_seconds)
        self.weight_seconds = weight_seconds
        self.fuse_wgrad_accumulation = False
        self.wgrad_store = _Waiting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _SplitTimed.apply(x, self.weight, self)
        return output

    def backward_dw(self) -> None:
        until = time.perf_counter() + self.weight_seconds
        self.wgrad_store.context.count -= 1
        self.weight.grad = torch.zeros(1)
        sleep_until(until)


class _Queue:
    """A queue of which only the length is asked."""

    def __init__(self) -> None:
        self.count = 0

    def qsize(self) -> int:
        return self.count


class _Waiting:
    def __init__(self) -> None:
        self.context = _Queue()

    def delay_wgrad_compute(self) -> bool:
        return True


class _SplitTimed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: SplitTimedStage) -> torch.Tensor:
        ctx.stage = stage
        until = time.perf_counter() + stage.seconds[0]
        output = x.clone()
        sleep_until(until)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        until = time.perf_counter() + ctx.stage.seconds[1]
        given = grads[0].clone()
        ctx.stage.wgrad_store.context.count += 1
        sleep_until(until)
        return given, None, None


def sleep_until(when: float) -> None:
    left = when - time.perf_counter()
    if left > 0:
        time.sleep(left)


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss function, and its report."""
    loss = output.mean()
    return loss, {"loss": loss.detach()}

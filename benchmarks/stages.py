"""The models that benchmarks run: one with almost no compute, and models whose compute takes a known time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch


class AddWeight(torch.nn.Module):
    """`x + w`, the least compute of a stage with a parameter. Keeps nothing for its backward."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """A context that takes ``seconds``: at its end it sleeps for the rest of the time."""
    until = time.perf_counter() + seconds
    yield
    time.sleep(max(0.0, until - time.perf_counter()))


class TimedStage(torch.nn.Module):
    """A stage whose forward and backward take given times, by sleeping: cores stay free for the transfers.

    The time includes the copies that a stage makes (its output, the gradient of its input). With ``keeps_copies`` it
    makes one more copy of each output, for sending. ``cost`` is the next microbatch's factor on these times."""

    keeps_copies = False

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seconds = (forward_seconds, backward_seconds)
        self.cost = 1.0
        self.copies: deque[torch.Tensor] = deque()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.taking(self.cost * self.seconds[0]):
            output: torch.Tensor = _Timed.apply(x, self.weight, self)
            if self.keeps_copies:
                self.copies.append(output.detach().clone())
        return output

    def taking(self, seconds: float) -> AbstractContextManager[None]:
        return lasting(seconds)

    def weight_gradient(self, cost: float) -> torch.Tensor | None:
        """The gradient of ``weight`` that the backward returns."""
        return torch.zeros_like(self.weight)


class CopyingStage(TimedStage):
    keeps_copies = True


class BusyStage(TimedStage):
    """A TimedStage on the current CUDA device. It keeps the device's stream busy."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__(forward_seconds, backward_seconds)
        self.cuda()
        self.cycles_per_second = 1e3 * cycles_per_ms(self.weight.device)

    def taking(self, seconds: float) -> AbstractContextManager[None]:
        torch.cuda._sleep(int(seconds * self.cycles_per_second))
        return nullcontext()


class CopyingBusyStage(BusyStage):
    keeps_copies = True


@cache
def cycles_per_ms(device: torch.device) -> float:
    """The cycles of ``torch.cuda._sleep`` for one millisecond on this device."""
    cycles = 10_000_000
    torch.cuda._sleep(cycles)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    torch.cuda._sleep(cycles)
    ended.record()
    torch.cuda.synchronize(device)
    return cycles / began.elapsed_time(ended)


class SplitTimedStage(TimedStage):
    """A TimedStage whose backward is in two halves. Its backward queues the weight gradients, as that of Transformer
    Engine's layers does. ``backward_dw()`` sleeps for the time of the oldest one. ``split_weight_grad`` supports such
    layers."""

    def __init__(self, forward_seconds: float, input_seconds: float, weight_seconds: float) -> None:
        super().__init__(forward_seconds, input_seconds)
        self.weight_seconds = weight_seconds
        self.fuse_wgrad_accumulation = False
        self.wgrad_store = SimpleNamespace(context=Queue[float](), delay_wgrad_compute=lambda: True)

    def weight_gradient(self, cost: float) -> None:
        self.wgrad_store.context.put(cost)

    def backward_dw(self) -> None:
        with self.taking(self.wgrad_store.context.get() * self.weight_seconds):
            self.weight.grad = torch.zeros(1)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, stage: TimedStage) -> torch.Tensor:
        ctx.stage, ctx.cost = stage, stage.cost
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        stage: TimedStage = ctx.stage
        with stage.taking(ctx.cost * stage.seconds[1]):
            return grads[0].clone(), stage.weight_gradient(ctx.cost), None


def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.mean()
    return loss, {"loss": loss.detach()}

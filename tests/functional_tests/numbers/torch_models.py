"""Modules of stages, each with a feature that a runtime of stages may get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split

HIDDEN, SAMPLES = 16, 3
QUEUE: list[Any] = []


class Block(nn.Module):
    """Layers of several kinds, and a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)
        self.shift = nn.Parameter(0.1 * torch.randn(SAMPLES, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(self.linear(x)))
        return x + self.convolution(y.unsqueeze(1)).squeeze(1) + self.shift


class Mixed(nn.Module):
    """Takes and gives float32 and bfloat16 tensors, integers, and a tensor without gradient."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.block, self.low = Block(), nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)
        self.first, self.last = first, last

    def forward(self, x: Tensor, half: Any = None, order: Any = None, scale: Any = None) -> Any:
        if self.first:
            half, order, scale = x.bfloat16(), torch.arange(HIDDEN - 1, -1, -1), torch.full((HIDDEN,), 0.5)
        x, half = self.block(x * scale + order % 3), torch.relu(self.low(half))
        return x + half.float() if self.last else (x, half, order, scale)


class Tied(nn.Module):
    """One weight used twice, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.frozen(self.linear(x))))


class Shifted(nn.Module):
    """Two parameters with equal gradients, which autograd passes on as one tensor, and an output that no stage uses."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(HIDDEN, HIDDEN), last
        self.one, self.other = (nn.Parameter(torch.randn(SAMPLES, HIDDEN)) for _ in range(2))

    def forward(self, x: Tensor, unused: Any = None) -> Any:
        x = torch.tanh(self.linear(x)) + self.one + self.other
        return x if self.last else (x, 2 * x)


class Skipping(nn.Module):
    """A model for ``pipeline()``: four stages; the last one uses an output of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        skip = torch.relu(first)
        pipe_split()
        second = self.layers[1](first)
        pipe_split()
        third = self.layers[2](second)
        pipe_split()
        return self.layers[3](third + skip)


class Delayed(torch.autograd.Function):
    """A linear layer whose backward leaves the weight gradient to ``QUEUE``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x @ layer.weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        QUEUE.append((ctx.layer.weight, ctx.saved_tensors[0], grad))
        return grad @ ctx.layer.weight, None


class WithBuilder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Delayed.apply(x.requires_grad_() if x.is_leaf else x, self.layer))  # type: ignore[no-untyped-call]

    def dw_builder(self) -> Callable[[], None]:
        left = list(QUEUE)
        QUEUE.clear()

        def run() -> None:
            for weight, x, grad in left:
                product = grad.t() @ x
                weight.grad = product if weight.grad is None else weight.grad + product

        return run

"""Stages of the toy model with unusual outputs, or with unusual uses of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_pp.testing.toy import ToyBlock


class OfStage(ToyBlock):
    """A stage whose output is ``then(stage number, input, function of the toy block)``."""

    def __init__(self, stage: int, then: Callable[[int, Tensor, Callable[[Tensor], Tensor]], Tensor]) -> None:
        super().__init__(stage)
        self.stage = stage
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.stage, x, super().forward)


def of_stage(then: Callable[[int, Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Callable[[int], OfStage]:
    return lambda stage: OfStage(stage, then)


def _views(stage: int, x: Tensor, block: Any) -> Tensor:
    """Each stage returns another kind of view: of a whole tensor, of half of a larger one, one of several, not
    contiguous."""
    y = block(x)
    if stage % 4 == 0:
        return y.view(y.shape)
    if stage % 4 == 1:
        return torch.cat([y, y], dim=0)[: y.shape[0]]
    return y.transpose(0, 1).contiguous().transpose(0, 1) if stage % 4 == 3 else y.unsqueeze(0)[0]


def _read_by_hook(stage: int, x: Tensor, block: Any) -> Tensor:
    y = block(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * (1.0 + 0.1 * torch.sin(y.detach())))
    return y


class SquaresInPython(torch.autograd.Function):
    """An autograd node written in Python, which saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class _PassesGradient(torch.autograd.Function):
    """Returns ``x`` with ``loss`` in its graph, as auxiliary losses of experts are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.saved_tensors[0])


def _with_auxiliary_loss(stage: int, x: Tensor, block: Any) -> Tensor:
    y = block(x)
    return _PassesGradient.apply(y, (y * y).mean())


class Frozen(ToyBlock):
    """A stage that is frozen if it is one of the first two. The outputs of the first need no gradient."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.requires_grad_(stage >= 2)


Views = of_stage(_views)
EndsInTanh = of_stage(lambda stage, x, block: torch.tanh(block(x)))
"""Stages whose output is saved for backward by the operation that makes it."""

UNUSUAL_OUTPUTS: dict[str, Callable[[int], torch.nn.Module]] = {
    "views": Views,
    "the input itself": of_stage(lambda stage, x, block: x if stage % 2 else block(x)),  # as a stage without layers
    "view of the input": of_stage(lambda stage, x, block: x.view(x.shape) if stage % 2 else block(x)),
    "frozen stages": Frozen,
    "output read by a hook": of_stage(_read_by_hook),
    "auxiliary loss": of_stage(_with_auxiliary_loss),
    "output saved": EndsInTanh,
}

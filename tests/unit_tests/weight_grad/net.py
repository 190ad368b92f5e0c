"""A model with layers of every kind, and its training step as autograd takes it and with weight gradients apart."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_pp.weight_grad import WeightGradStore

VOCAB, WIDTH, MICROBATCHES = 11, 8, 4


class _Square(torch.autograd.Function):
    """A custom autograd function with a parameter of its own: x * w^2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w * w, (2 * grad * x * w).sum((0, 1))


class _Custom(abc.ABC, nn.Module):  # an abstract base: its class has another layout
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _Square.apply(x, self.weight)


class Net(nn.Module):
    """Tied embedding and head, norms, attention that uses its child's weight, a convolution, a custom function, a bare
    parameter, a frozen layer, a layer used twice, and one with a parametrized weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.custom = _Custom()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.bias_only = nn.Linear(WIDTH, WIDTH)
        self.bias_only.weight.requires_grad_(False)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.norm(self.up(x)))) * self.scale
        x = x + self.attention(x, x, x)[0]
        x = x + self.convolution(x.permute(1, 2, 0)).permute(2, 0, 1)
        x = self.bias_only(self.frozen(self.custom(x)))
        x = x + self.twice(torch.tanh(self.twice(x)))
        return self.head(self.normed(x))


def new_net() -> Net:
    torch.manual_seed(0)
    return Net()


def tokens(mb: int) -> Tensor:
    return torch.randint(0, VOCAB, (5, 2), generator=torch.Generator().manual_seed(mb))


def loss_of(model: nn.Module, mb: int) -> Tensor:
    return model(tokens(mb)).pow(2).mean()


def plain_step(model: nn.Module, microbatches: int = MICROBATCHES) -> None:
    for mb in range(microbatches):
        loss_of(model, mb).backward()


def split_step(
    model: nn.Module,
    store: WeightGradStore,
    split: Callable[[int], bool] = lambda mb: True,
    delay: int = 1,
    microbatches: int = MICROBATCHES,
) -> None:
    """All forwards, then backwards with each W ``delay`` backwards late, but before the next whole backward."""
    with store.step({0: microbatches - 1}):
        losses = [loss_of(model, mb) for mb in range(microbatches)]
        waiting: list[int] = []
        for mb in range(microbatches):
            while waiting and (len(waiting) > delay or not split(mb)):
                store.run(0, waiting.pop(0))
            with store.backward(0, mb, split=split(mb)):
                losses[mb].backward()
            if split(mb):
                waiting.append(mb)
        for mb in waiting:
            store.run(0, mb)


def run_split(
    store: WeightGradStore,
    loss_of: Callable[[int], Tensor],
    microbatches: int = 1,
    w_order: Sequence[int] | None = None,
    split: bool = True,
) -> None:
    """A step of one chunk: all forwards, all backwards, then W in ``w_order``."""
    order = range(microbatches) if w_order is None else w_order
    with store.step({0: order[-1] if split else microbatches - 1}):
        losses = [loss_of(mb) for mb in range(microbatches)]
        for mb, loss in enumerate(losses):
            with store.backward(0, mb, split=split):
                loss.backward()
        for mb in order if split else ():
            store.run(0, mb)


def step_on_ones(model: nn.Linear, store: WeightGradStore) -> None:
    run_split(store, lambda mb: model(torch.ones(1, model.in_features)).sum())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def count_hooks(model: nn.Module) -> dict[str, int]:
    fired: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            fired[name] = 0
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.update({name: fired[name] + 1}))
    return fired

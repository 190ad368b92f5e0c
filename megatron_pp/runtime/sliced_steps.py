"""One slice of a microbatch through one model chunk: what ``ModelSteps`` does, with the data, the loss and the marks of
a microbatch spread over its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_pp.runtime.compute import ModelSteps
from megatron_pp.runtime.sequence_slices import SequenceSlice, sequence_slice


def current_slice() -> SequenceSlice:
    part = sequence_slice()
    assert part is not None, "a plan with slices runs each operation in one"
    return part


class _EachSlice:
    """An iterator that gives the items of a microbatch again to each of its slices."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items
        self.drawn: list[Any] = []
        self.slice = -1
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        part = current_slice()
        if part.index != self.slice:
            self.slice, self.next = part.index, 0
            if part.index == 0:
                self.drawn = []
        if self.next == len(self.drawn):
            self.drawn.append(next(self.items))
        self.next += 1
        return self.drawn[self.next - 1]


class _DividedLater(torch.autograd.Function):
    """A sum over a slice's tokens, whose gradient is divided by the tokens of the whole microbatch: they are known when
    the first backward of the last stage runs, after all forwards of its slices.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, tokens: list[Any]) -> Tensor:
        ctx.tokens = tokens
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = sum(ctx.tokens)
        return grad / (total.clamp(min=1) if isinstance(total, Tensor) else max(total, 1)), None


class SlicedSteps(ModelSteps):
    """``ModelSteps`` of a plan with slices. Of each slice the loss function gets the output and reports; a mean counts
    by the slice's share of the tokens, a sum and its tokens as they are.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data_iterators = [
            _EachSlice(items) if hasattr(items, "__next__") else items for items in self.data_iterators
        ]
        self._mark_first = [None if mark is None else partial(_in_first_slice, mark) for mark in self._mark_first]
        self._tokens: list[Any] = []  # of each slice so far of the microbatch that the last stage runs forward

    def _call(self, chunk: int, mb: int) -> tuple[Any, Any]:
        output, loss_func = super()._call(chunk, mb)
        return output, None if loss_func is None else partial(self._loss, loss_func)

    def _loss(self, loss_func: Callable[..., Any], output: Any, **options: Any) -> Any:
        returned, part = loss_func(output, **options), current_slice()
        if options or not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
            return returned  # no loss, or refused by the caller
        if len(returned) == 2:
            return returned[0] * part.share, returned[1]
        if self.settings.calculate_per_token_loss:
            return returned
        loss, tokens, report = returned
        self.record.num_tokens = self.record.num_tokens + tokens
        self._tokens = [] if part.index == 0 else self._tokens
        self._tokens.append(tokens)
        return _DividedLater.apply(loss, self._tokens), report


def _in_first_slice(mark: Callable[[], Any]) -> None:
    if current_slice().index == 0:
        mark()

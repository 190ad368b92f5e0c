"""The mean over the microbatches of a step, beside gradients of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def divided_by(count: int, parameters: Callable[[], Iterable[Tensor]]) -> Iterator[None]:
    """Around a step: divides what it adds to the gradients of ``parameters()`` by ``count``, and nothing else.

    Gradients that are there before the step are copied, kept until its end, and added in place, in the tensors that
    held them. A step that fails leaves them as they were."""
    if count == 1:
        yield
        return
    earlier: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its gradient, a copy of that
    with torch.no_grad():
        for parameter in parameters():
            if parameter.grad is not None:
                earlier.append((parameter, parameter.grad, parameter.grad.detach().clone()))
                parameter.grad.zero_()
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, grad, before in earlier:
                parameter.grad = grad
                grad.copy_(before)
        raise
    with torch.no_grad():
        for parameter in parameters():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        for parameter, _, before in earlier:
            if parameter.grad is None:
                parameter.grad = before
            else:
                parameter.grad.add_(before)

"""A tap: a parameter as a layer sees it during a pipeline step, whose gradient goes to the store rather than to the
parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pp.weight_grad.store import WeightGradStore


class _Source(NamedTuple):
    """Parameter and store, out of autograd's sight."""

    parameter: Tensor
    store: WeightGradStore


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, source: _Source) -> Tensor:
        ctx.source = source
        ctx.set_materialize_grads(False)
        return source.parameter.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        ctx.source.store.arrive(ctx.source.parameter, grad)
        return None, None


def tapped(parameter: Tensor, store: WeightGradStore) -> Tensor:
    """``parameter``'s data with a graph that leads to ``store``. Megatron's attributes come along."""
    tap: Tensor = _Tap.apply(store.anchor, _Source(parameter, store))
    tap.__dict__.update(parameter.__dict__)
    tap._tapped_parameter = parameter  # type: ignore[attr-defined]
    return tap


def parameter_behind(tensor: Tensor) -> Tensor:
    """The parameter that ``tensor`` is a tap of, or ``tensor`` itself."""
    return getattr(tensor, "_tapped_parameter", tensor)

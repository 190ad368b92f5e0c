"""Layers that defer their weight gradients themselves: Transformer Engine's, built with ``delay_wgrad_compute=True``.

Such a layer queues its weight gradient in backward and computes it in ``backward_dw()``, first in, first out over all
microbatches. That adds to ``main_grad`` where ``layer.fuse_wgrad_accumulation``; else it assigns ``.grad``, for a bias
only if there is none. So each microbatch runs as if it were the only one, and the store adds up what it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn


def delays_weight_grad(layer: nn.Module) -> bool:
    """Whether ``layer`` is one that queues its weight gradients."""
    store = getattr(layer, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def delayed_names(layer: nn.Module) -> list[str]:
    """Parameters whose gradients are left to ``backward_dw()``: all but a norm's, which have theirs from autograd."""
    names = layer._parameters if delays_weight_grad(layer) else ()
    return [name for name in names if not name.startswith("layer_norm")]


def hooked_names(layer: nn.Module) -> list[str]:
    """Those of them whose hooks ``backward_dw()`` calls, each time, as under Megatron's DistributedDataParallel."""
    return delayed_names(layer) if getattr(layer, "wgrad_accumulation_and_reduce_hooks", None) else []


class DelayedRun:
    """What one backward leaves to a layer's ``backward_dw()``, in the place of a ``Deferred``. Made before the
    backward, which ``end_backward`` ends.
    """

    kept: tuple[Tensor, ...] = ()  # the layer has them

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        parameters = (layer._parameters[name] for name in delayed_names(layer))
        self.parameters: list[Tensor] = [parameter for parameter in parameters if parameter is not None]
        self._entries = -self._queued()
        self._grads = _exchange(self.parameters, [None] * len(self.parameters))

    def end_backward(self) -> None:
        self._entries += self._queued()
        self._grads = _exchange(self.parameters, self._grads)
        if not self._entries:  # it was not used, or its weights are frozen: a bias may have its gradient from autograd
            have = [grad is not None for grad in self._grads]
            self.parameters, self._grads = list(compress(self.parameters, have)), list(compress(self._grads, have))

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(parameter, gradient) for each; None where the layer added it to ``main_grad``, or its hooks took it."""
        fused, grads, sums = bool(self.layer.fuse_wgrad_accumulation), self._grads, dict[Tensor, Tensor]()
        if not self._entries:
            return zip(self.parameters, grads, strict=True)
        left = self._queued() - self._entries
        while (waiting := self._queued()) > left:  # more than once where the layer is used several times
            aside = _exchange(self.parameters, grads)
            self.layer.backward_dw()
            if self._queued() >= waiting:
                raise RuntimeError(f"{type(self.layer).__name__}.backward_dw() left its queue as it was")
            for parameter, grad in zip(self.parameters, _exchange(self.parameters, aside), strict=True):
                if grad is not None and not (fused and parameter.dim() > 1):  # else it is autograd's dummy
                    sums[parameter] = sums[parameter].add_(grad) if parameter in sums else grad
            grads = [None if grad is None else torch.zeros_like(grad) for grad in grads]
        return ((parameter, sums.get(parameter)) for parameter in self.parameters)

    def _queued(self) -> int:
        return int(self.layer.wgrad_store.context.qsize())


def _exchange(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Set ``.grad`` of each parameter; returns what it was."""
    before = []
    for parameter, grad in zip(parameters, grads, strict=True):
        before.append(parameter.grad)
        parameter.grad = grad
    return before

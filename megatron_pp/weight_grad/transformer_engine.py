"""Layers that defer their weight gradients themselves: Transformer Engine's, built with ``delay_wgrad_compute=True``.

Such a layer queues its weight gradient in backward and computes it in ``backward_dw()``, first in, first out over all
microbatches, so that the store only counts entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn


def delays_weight_grad(layer: nn.Module) -> bool:
    """Whether ``layer`` is one that queues its weight gradients."""
    store = getattr(layer, "wgrad_store", None)
    if store is None or not callable(getattr(layer, "backward_dw", None)):
        return False
    asked = getattr(store, "delay_wgrad_compute", None)
    return bool(asked()) if callable(asked) else bool(getattr(store, "enabled", False))


def fires_hooks(layer: Any) -> bool:
    """Whether ``backward_dw()`` calls the accumulation hooks, as under Megatron's DistributedDataParallel."""
    return bool(getattr(layer, "wgrad_accumulation_and_reduce_hooks", None))


def queued(layer: Any) -> int:
    return int(layer.wgrad_store.context.qsize())


class DelayedRun(NamedTuple):
    """``entries`` of such a layer's queue, in the place of a ``Deferred``; a call of two matrices has two."""

    layer: Any
    entries: int
    kept: tuple[Tensor, ...] = ()  # the layer has them

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(p for p in self.layer._parameters.values() if p is not None and p.requires_grad)

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(parameter, gradient) for each; None where the layer added it to ``main_grad``.

        Without fused accumulation ``backward_dw()`` assigns ``.grad`` instead of adding to it.
        """
        left = queued(self.layer) - self.entries
        unfused = [p for p in self.parameters if getattr(p, "main_grad", None) is None]
        before, sums = [p.grad for p in unfused], dict[Tensor, Tensor]()
        for parameter in unfused:
            parameter.grad = None
        while (waiting := queued(self.layer)) > left:
            self.layer.backward_dw()
            if queued(self.layer) >= waiting:
                raise RuntimeError(f"{type(self.layer).__name__}.backward_dw() left its queue as it was")
            for parameter in unfused:
                grad, parameter.grad = parameter.grad, None
                if grad is not None:
                    sums[parameter] = sums[parameter].add_(grad) if parameter in sums else grad
        for parameter, grad in zip(unfused, before, strict=True):
            parameter.grad = grad
        return ((parameter, sums.get(parameter)) for parameter in self.parameters)

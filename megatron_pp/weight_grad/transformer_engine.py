"""Layers that defer their weight gradients themselves: Transformer Engine's, built with ``delay_wgrad_compute=True``.

Such a layer queues its weight gradient in backward and computes it in ``backward_dw()``, first in, first out over all
microbatches, so that the store only counts entries.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def delays_weight_grad(layer: nn.Module) -> bool:
    """Whether ``layer`` is one that queues its weight gradients."""
    store = getattr(layer, "wgrad_store", None)
    if store is None or not callable(getattr(layer, "backward_dw", None)):
        return False
    asked = getattr(store, "delay_wgrad_compute", None)
    return bool(asked()) if callable(asked) else bool(getattr(store, "enabled", False))


class DelayedLayer:
    """One such layer, as the store drives it."""

    def __init__(self, layer: Any, chunk: int) -> None:
        self.layer = layer
        self.chunk = chunk

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(p for p in self.layer._parameters.values() if p is not None and p.requires_grad)

    def waiting(self) -> int:
        return int(self.layer.wgrad_store.context.qsize())

    def run(self, entries: int) -> bool:
        """Run ``entries`` of the layer's queue; a layer of two matrices takes two at a time. Returns whether the layer
        fires hooks itself.

        Without fused accumulation the layer assigns ``.grad`` instead of adding to it, so the old value is kept aside.
        """
        left = self.waiting() - entries
        unfused = [p for p in self.parameters if getattr(p, "main_grad", None) is None]
        before: dict[Tensor, Tensor] = {p: p.grad for p in unfused if p.grad is not None}
        for parameter in unfused:
            parameter.grad = None
        while self.waiting() > left:
            self._run_one(before)
        for parameter, grad in before.items():
            if parameter.grad is None:
                parameter.grad = grad
        return bool(getattr(self.layer, "wgrad_accumulation_and_reduce_hooks", None))

    def _run_one(self, before: dict[Tensor, Tensor]) -> None:
        waiting = self.waiting()
        self.layer.backward_dw()
        if self.waiting() >= waiting:
            raise RuntimeError(f"{type(self.layer).__name__}.backward_dw() left its queue as it was")
        for parameter in self.parameters:
            if getattr(parameter, "main_grad", None) is not None or parameter.grad is None:
                continue
            grad, parameter.grad = parameter.grad, None
            so_far = before.get(parameter)
            before[parameter] = grad if so_far is None else so_far.add_(grad)

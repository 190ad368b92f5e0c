"""Layers that delay their weight gradients themselves: Transformer Engine's.

Such a layer queues its weight gradient in backward and computes it in ``backward_dw()``, first in, first out over all
microbatches. With ``layer.fuse_wgrad_accumulation`` that method adds to ``main_grad``. Otherwise it assigns ``.grad``,
for a bias only if it has none. So the store lets each microbatch run as if it were the only one, and adds up the
results.

Layers built with ``delay_wgrad_compute=True`` always queue. Others queue in pipeline steps, by a ``SwitchedQueue``.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pp.weight_grad.deferred import tensors_in

Grads = dict[Tensor, Tensor | None]  # parameter -> its gradient
_LIBRARY = "transformer_engine."


def delays_weight_grad(layer: nn.Module) -> bool:
    """Whether ``layer`` queues its weight gradients itself."""
    store = getattr(layer, "wgrad_store", None)
    return store is not None and bool(store.delay_wgrad_compute())


def delayed_names(layer: nn.Module) -> list[str]:
    """Names of the parameters whose gradients ``backward_dw()`` computes: all except a norm's, which autograd
    computes."""
    names = layer._parameters if delays_weight_grad(layer) else ()
    return [name for name in names if not name.startswith("layer_norm")]


def hooked_names(layer: nn.Module) -> list[str]:
    """The parameters of ``delayed_names`` whose hooks ``backward_dw()`` calls, as under Megatron's
    DistributedDataParallel."""
    return delayed_names(layer) if getattr(layer, "wgrad_accumulation_and_reduce_hooks", None) else []


# -- layers built without delay_wgrad_compute --------------------------------------------------------------------------


def from_the_library(layer: nn.Module) -> bool:
    """Whether the class of ``layer`` is, or is derived from, one of Transformer Engine's."""
    return any(base.__module__.startswith(_LIBRARY) for base in type(layer).__mro__)


# Attribute that Megatron's --tp-comm-overlap sets -> the effect of Userbuffers. Layers of one name share buffers.
_USERBUFFERS = {
    "ub_bulk_wgrad": "overlap its weight gradient with communication (tp_comm_bulk_wgrad)",
    "ub_bulk_dgrad": "gather its input in a buffer that other layers overwrite before W (tp_comm_bulk_dgrad)",
    "ub_overlap_ag_dgrad": "gather its output gradient in a buffer that others overwrite before W (tp_comm_overlap_ag)",
}


def why_not_switched(layer: nn.Module) -> str:
    """Why a layer of Transformer Engine cannot get a ``SwitchedQueue``; empty if it can."""
    if getattr(layer, "wgrad_store", None) is None or not hasattr(layer, "fuse_wgrad_accumulation"):
        return "this class of the installed Transformer Engine has no delay_wgrad_compute"
    for name, effect in _USERBUFFERS.items():
        if getattr(layer, name, False):
            return f"Userbuffers {effect}"
    if len(getattr(layer, "weight_names", ())) > 1:
        return "its weight is in several parameters (parameters_split)"
    return ""


class SwitchedQueue:
    """Makes a layer queue its weight gradients between ``open`` and ``close``. At other times it computes as built.

    Gradients of its parameters reach the leaves of the step, so no hook fires in its backward."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.built = layer.wgrad_store
        layer.wgrad_store = type(self.built)(True)
        self.close()

    def open(self) -> None:
        self.layer.wgrad_store.enable_delay_wgrad_compute()

    def close(self) -> None:
        """Drop the gradients that still wait, and let the layer compute as it was built."""
        store = self.layer.wgrad_store
        while store.context.qsize():
            store.context.get()
        store.disable_delay_wgrad_compute()

    def remove(self) -> None:
        """Give the layer back the queue with which it was built."""
        self.layer.wgrad_store = self.built


# -- one backward ------------------------------------------------------------------------------------------------------


class DelayedRun:
    """The gradients that one backward leaves to a layer's ``backward_dw()``, in place of a ``Deferred``. Made before
    the backward; ``end_backward`` is called after it."""

    kept: tuple[Tensor, ...] = ()  # empty: the layer itself keeps the tensors

    def __init__(self, layer: Any, switched: bool) -> None:
        self.layer = layer
        self.switched = switched  # its parameters have leaves in autograd's graph
        parameters = (layer._parameters[name] for name in delayed_names(layer))
        # Autograd's gradient of each parameter. ``backward_dw()`` reads it.
        self._grads: Grads = {parameter: None for parameter in parameters if parameter is not None}
        self._entries = -self._queued()
        self._beside: dict[Tensor, Tensor] = {}  # gradients of weights used outside of their layer
        if not switched:
            self._grads = _swap(self._grads)

    @property
    def parameters(self) -> list[Tensor]:
        return list(self._grads)

    def takes(self, parameter: Tensor, grad: Tensor) -> bool:
        """Take a gradient that reached the leaf of a switched layer's parameter. If this backward did not use the
        layer, returns False and takes nothing."""
        if self._queued() + self._entries <= 0:
            return False
        if parameter.dim() <= 1:
            self._grads[parameter] = grad
        elif not (self.layer.fuse_wgrad_accumulation or hasattr(self.layer, "num_gemms")):
            self._beside[parameter] = grad
        return True  # other gradients are dummies: grouped layers return memory that ``backward_dw()`` fills later

    def end_backward(self) -> None:
        self._entries += self._queued()
        if not self.switched:
            self._grads = _swap(self._grads)
        # The layer was not used, or its weights are frozen. Autograd may have computed a bias's gradient.
        if not self._entries:
            self._grads = {parameter: grad for parameter, grad in self._grads.items() if grad is not None}

    def queued(self) -> list[Tensor]:
        """The tensors that the layer has queued in this backward, which has just ended."""
        return list(tensors_in(list(self.layer.wgrad_store.context.queue)[-self._entries :] if self._entries else ()))

    def prepare(self) -> None:
        """Does nothing: no communication runs ahead of ``compute``."""

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(parameter, gradient) of each parameter. The gradient is None if the layer added it to ``main_grad``, or its
        hooks took it."""
        if not self._entries:
            return iter(self._grads.items())
        grads = self._grads
        sums = dict[Tensor, Tensor]()
        fused = bool(self.layer.fuse_wgrad_accumulation)
        backward_dw = self._backward_dw()
        left = self._queued() - self._entries
        while (waiting := self._queued()) > left:  # more than once if the layer is used several times
            aside = _swap(grads)
            backward_dw()
            if self._queued() >= waiting:
                raise RuntimeError(f"{type(self.layer).__name__}.backward_dw() left its queue as it was")
            for parameter, grad in _swap(aside).items():
                if grad is not None and not (fused and parameter.dim() > 1):  # otherwise it is autograd's dummy
                    sums[parameter] = sums[parameter].add_(grad) if parameter in sums else grad
            grads = {p: None if grad is None else torch.zeros_like(grad) for p, grad in grads.items()}
        for parameter, grad in self._beside.items():
            sums[parameter] = sums[parameter] + grad
        return ((parameter, sums.get(parameter)) for parameter in self.parameters)

    def _backward_dw(self) -> Callable[[], None]:
        """The layer's ``backward_dw``. For a switched layer it is Transformer Engine's method, because Megatron's does
        nothing unless its config has delay_wgrad_compute."""
        if self.switched:
            for base in type(self.layer).__mro__:
                if base.__module__.startswith(_LIBRARY) and "backward_dw" in vars(base):
                    return vars(base)["backward_dw"].__get__(self.layer)
        return self.layer.backward_dw

    def _queued(self) -> int:
        return int(self.layer.wgrad_store.context.qsize())


def _swap(grads: Grads) -> Grads:
    """Set ``.grad`` of each parameter. Returns the values that it had before."""
    before = {parameter: parameter.grad for parameter in grads}
    for parameter, grad in grads.items():
        parameter.grad = grad
    return before

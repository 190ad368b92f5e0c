"""Delivery of a finished gradient to its parameter, with or without its accumulation hooks.

DistributedDataParallel, Megatron's main_grad and optimizers in backward put hooks on a parameter's AccumulateGrad node.
In a pipeline step they fire once per parameter, with its last gradient; earlier gradients are added without hooks, by
the same addition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_silently(parameter: Tensor, grad: Tensor) -> None:
    """Add ``grad`` to ``main_grad`` or ``.grad``. Tensor hooks run, and may change the gradient; accumulation hooks
    do not. Nothing else holds ``grad``, so that it may become ``.grad`` itself.
    """
    grad = through_tensor_hooks(parameter, grad)
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        main_grad.add_(grad)
        return
    if grad.dtype != parameter.dtype:
        grad = grad.to(parameter.dtype)
    if parameter.grad is None:
        like = grad.is_sparse or grad.stride() == parameter.stride()
        parameter.grad = grad if like else torch.empty_like(parameter).copy_(grad)
    else:
        parameter.grad.add_(grad)


def add_and_fire(parameter: Tensor, grad: Tensor | None) -> None:
    """Add the last gradient of a step (None where all are added already) and fire every accumulation hook once.

    With a ``main_grad``, hooks get Megatron's signal ``grad_added_to_main_grad`` and a zero gradient.
    """
    frozen = not parameter.requires_grad  # since its backward: autograd would call no hook
    has_main_grad = getattr(parameter, "main_grad", None) is not None
    if grad is not None and (frozen or has_main_grad):
        add_silently(parameter, grad)
    if frozen:
        return
    if grad is not None and not has_main_grad:
        torch.autograd.backward([parameter], [grad.to(parameter.dtype)])
        return
    had_grad = parameter.grad is not None
    if has_main_grad:
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    _fire_with_zeros(parameter)
    if has_main_grad and not had_grad:
        parameter.grad = None


def _fire_with_zeros(parameter: Tensor) -> None:
    """Fire accumulation hooks without a gradient. Tensor hooks, which have run on every gradient, do not run again."""
    hooks: dict[int, Any] = parameter._backward_hooks or {}
    aside = dict(hooks)
    hooks.clear()
    try:
        zeros = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        torch.autograd.backward([parameter], [zeros])
    finally:
        hooks.update(aside)


def through_tensor_hooks(parameter: Tensor, grad: Tensor) -> Tensor:
    """The gradient after the hooks of ``parameter.register_hook``."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad

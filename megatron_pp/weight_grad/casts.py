"""Autocast's casts of what split layers multiply."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


class Casts:
    """Casts as autocast does: float64 stays as it is, and a leaf that wants a gradient (a parameter, a stage's input)
    has one cast that all its users share, so that their gradients are added up in the lower precision.
    """

    def __init__(self) -> None:
        self._shared: dict[tuple[int, torch.dtype], tuple[weakref.ref[Tensor], int]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is dtype or tensor.dtype is torch.float64 or not tensor.is_floating_point():
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        key, version = (id(tensor), dtype), tensor._version
        found, at = self._shared.get(key, (None, version))
        cast = None if found is None or at != version else found()
        if cast is None:  # a cast that lives keeps the leaf alive, and its id
            cast = tensor.to(dtype)
            self._shared[key] = (weakref.ref(cast), version)
        return cast

    def clear(self) -> None:
        self._shared.clear()

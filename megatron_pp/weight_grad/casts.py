"""Autocast's casts of the operands of split layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_pp.weight_grad.parameter_leaf import assignments


class _Cast(NamedTuple):
    """``tensor`` in a lower precision, made when the original had ``state``."""

    tensor: Tensor
    state: tuple[int, int]


class Casts:
    """Casts as autocast does: float64 stays, and all users of a leaf that requires a gradient share one cast, so that
    their gradients are added in the lower precision. Cleared at each backward; graphs hold what they need.
    """

    def __init__(self) -> None:
        self._shared: dict[tuple[int, torch.dtype], _Cast] = {}  # a cast keeps its leaf alive, and so the leaf's id

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is dtype or tensor.dtype is torch.float64 or not tensor.is_floating_point():
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        key, state = (id(tensor), dtype), (tensor._version, assignments(tensor))
        found = self._shared.get(key)
        if found is None or found.state != state:
            found = self._shared[key] = _Cast(tensor.to(dtype), state)
        return found.tensor

    def clear(self) -> None:
        self._shared.clear()

"""Kernels that a device has loaded. CUDA loads the module of a kernel at its first launch, and waits for that until the
device is idle: for all that the process has issued, receives that wait for their peers among it (measured on an H200:
``docs/data/gpu_waits.csv``).

A kernel is told by the operation and the dtypes that it works on, one of a matrix product by its shapes as well, as
cuBLAS has kernels for sizes. Operations in place, of filling and of copying have the kernel of their kind. Copies of a
block of memory as it is, and allocations, launch no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_COPIES = {"copy_", "clone", "_to_copy", "lift_fresh"}
_FILLS = {"fill_", "full", "full_like", "new_full", "ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros"}
_SAME = {**dict.fromkeys(_COPIES, "copy"), **dict.fromkeys((*_FILLS, "zero_"), "fill")}
_TO_HOST = {"_local_scalar_dense"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear"}


class Kernel(NamedTuple):
    """One that is loaded by itself."""

    operation: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...] = ()


def kernel_of(operation: str, tensors: Sequence[torch.Tensor], crosses: bool) -> Kernel | None:
    """What the operation launches on ``tensors``, which it reads, writes and makes; None where that is no kernel.
    ``crosses``: some of them lie in host memory."""
    if operation in _ALLOCATIONS or operation in _TO_HOST:
        return None
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in tensors))
    if operation in _COPIES and (crosses or _is_one_block(tensors, dtypes)):
        return None
    name = _SAME.get(operation, operation.removesuffix("_"))
    return Kernel(name, dtypes, tuple(t.shape for t in tensors) if operation in _PRODUCTS else ())


def _is_one_block(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    return len(dtypes) <= 1 and all(tensor.is_contiguous() for tensor in tensors)

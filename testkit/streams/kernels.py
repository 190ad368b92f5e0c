"""Kernels that a device has loaded. CUDA loads a kernel's module at its first launch, and first waits until the device
is idle: for all that the process has issued, also for receives that wait for their peers (measured on an H200:
``docs/data/gpu_waits.csv``).

The operation and its dtypes decide the kernel. For a matrix product the shapes decide too, because cuBLAS has kernels
for sizes. In-place operations, fills and copies have the kernel of their kind. Allocations, and copies of a block of
memory without a conversion, launch no kernel.
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
    """A kernel that is loaded by itself."""

    operation: str
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...] = ()


def kernel_of(operation: str, tensors: Sequence[torch.Tensor], crosses: bool) -> Kernel | None:
    """The kernel that the operation launches on ``tensors``, which it reads, writes and makes. None if it launches no
    kernel. ``crosses``: whether some of them are in host memory."""
    if operation in _ALLOCATIONS or operation in _TO_HOST:
        return None
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in tensors))
    if operation in _COPIES and (crosses or _is_one_block(tensors, dtypes)):
        return None
    name = _SAME.get(operation, operation.removesuffix("_"))
    return Kernel(name, dtypes, tuple(t.shape for t in tensors) if operation in _PRODUCTS else ())


def _is_one_block(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    return len(dtypes) <= 1 and all(tensor.is_contiguous() for tensor in tensors)

"""A CPU stand-in for Transformer Engine's compiled extension: the functions that unquantised layers call.

It follows the calls in the Python of transformer-engine 2.20. Any other name of the extension can be imported, and
raises NotImplementedError when it is called.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class DType(enum.IntEnum):
    """The extension's dtypes by name. Their numbers are arbitrary."""

    kByte = 0  # noqa: N815
    kInt32 = 2  # noqa: N815
    kFloat32 = 4  # noqa: N815
    kFloat16 = 5  # noqa: N815
    kBFloat16 = 6  # noqa: N815
    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
    kFloat4E2M1 = 10  # noqa: N815


_TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}


def generic_gemm(
    a: Tensor, transa: bool, b: Tensor, transb: bool, out: Tensor | None, quantizer: Any, out_dtype: Any, bias: Any,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Tensor, workspace_size: int, accumulate: bool,
    use_split_accumulator: bool, **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, None]:  # fmt: skip
    """op(b) @ op(a), as cuBLAS computes row-major matrices: half-precision products are added in float32. With ``grad``
    and ``bias`` it also returns the sum of ``b`` over its rows; otherwise ``bias`` is added.
    """
    assert (quantizer, gelu, overlap["comm_overlap"]) == (None, False, None)
    flat_a, flat_b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    left, right = (flat_b.t() if transb else flat_b), (flat_a.t() if transa else flat_a)
    dtype = a.dtype if out_dtype is None else _TORCH[DType(int(out_dtype))]
    product = (left.float() @ right.float() if dtype.itemsize > a.dtype.itemsize else left @ right).to(dtype)
    if not transb:
        product = product.view(*b.shape[:-1], product.shape[-1])
    if bias is not None and not grad:
        product = product + bias
    if out is not None:
        product = out.add_(product) if accumulate else out.copy_(product)
    return product, flat_b.sum(0) if bias is not None and grad else None, None, None


def get_num_cublas_streams() -> int:
    return 1


def te_general_grouped_gemm(
    a: list[Tensor], transa: bool, b: list[Tensor], transb: bool, out: list[Tensor], out_dtype: Any,
    m_splits: Iterable[int] | None, bias: list[Tensor], bias_dtype: Any, single_output: bool, gelu_in: list[Tensor],
    grad: bool, workspace: Any, workspace_size: int, accumulate: bool, use_split_accumulator: bool, *more: Any,
) -> list[Tensor]:  # fmt: skip
    """``generic_gemm`` of each pair. ``single_output``: the rows of the products are one after the other in one tensor.
    With ``grad``, the tensors of ``bias`` that are not empty get the sums of ``b`` over its rows.
    """
    outs = list(out[0].split([len(part) for part in b])) if single_output else out
    for left, right, product, its_bias in zip(a, b, outs, bias, strict=True):
        given = its_bias if its_bias.numel() else None
        rest = (False, None, grad, workspace, workspace_size, accumulate, use_split_accumulator)
        _, sums, *_ = generic_gemm(
            left, transa, right, transb, product, None, out_dtype, given, bias_dtype, *rest, comm_overlap=None
        )
        if grad and given is not None and sums is not None:
            its_bias.copy_(sums)
    return bias


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, margin: int, zero: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer norm of each row, the row's mean, and the reciprocal of its standard deviation."""
    assert (quantizer, zero) == (None, False)
    return torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, margin: int, zero: bool
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(grad, x, x.shape[-1:], mean, deviation, weight, torch.zeros_like(weight), [True] * 3)


def gelu(x: Tensor, quantizer: Any, *more: Any) -> Tensor:
    assert quantizer is None
    return F.gelu(x, approximate="tanh")


def dgelu(grad: Tensor, x: Tensor, quantizer: Any, *more: Any) -> Tensor:
    assert quantizer is None
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


class _Absent(type):
    """A name of the extension without a stand-in. Its attributes are numbers, and calling it is an error."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return getattr(cls, name)

    @property
    def __members__(cls) -> set[str]:
        return {name for name in vars(cls) if not name.startswith("__")}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{cls.__name__} has no CPU stand-in")


class Extension(types.ModuleType):
    """The stand-in module. ``names``: the names that ``import *`` imports."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__("transformer_engine_torch")
        self.__all__ = list(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        here = vars(sys.modules[__name__])
        setattr(self, name, here[name] if name in here else _Absent(name, (), {}))
        return getattr(self, name)

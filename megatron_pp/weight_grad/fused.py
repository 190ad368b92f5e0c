"""Weight gradients added directly into ``main_grad``, by one kernel where there is one for it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from megatron_pp.errors import FusedWeightGradError

_HALF = (torch.float16, torch.bfloat16)
# Earlier releases do not add to a float32 matrix (pytorch#167931).
_ADDMM_WIDENS = torch.__version__ >= (2, 13)  # type: ignore[operator]


def fused_kernels() -> Any | None:
    """apex's extension module ``fused_weight_gradient_mlp_cuda``, or None where it or a CUDA device is missing. The
    package named apex on PyPI is something else.
    """
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        return None


def add_weight_grad(
    kernels: Any | None, layer_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """``main_grad += grad_output^T @ layer_input``, in place.

    ``layer_input`` is [tokens, in], ``grad_output`` [tokens, out], ``main_grad`` [out, in] in float32, float16 or
    bfloat16. With float32 the products of half-precision inputs are added in float32: on CUDA by apex's kernel, by
    torch's addmm or by Transformer Engine's GEMM, else after a cast. Raises FusedWeightGradError for other dtypes.
    """
    if main_grad.dtype not in (torch.float32, *_HALF):
        raise FusedWeightGradError(
            f"main_grad is {main_grad.dtype}; gradient accumulation fusion adds into float32, float16 or bfloat16"
        )
    wide = main_grad.dtype == torch.float32
    widens = wide and layer_input.dtype == grad_output.dtype and layer_input.dtype in _HALF and main_grad.is_cuda
    if kernels is not None:
        kernel = kernels.wgrad_gemm_accum_fp32 if wide else kernels.wgrad_gemm_accum_fp16
        kernel(layer_input.contiguous(), grad_output.contiguous(), main_grad)
    elif widens and _ADDMM_WIDENS:
        torch.addmm(main_grad, grad_output.t(), layer_input, out_dtype=torch.float32, out=main_grad)
    elif widens and main_grad.is_contiguous() and (gemm := _transformer_engine_gemm()) is not None:
        gemm(layer_input, grad_output, layout="NT", out=main_grad, out_dtype=torch.float32, accumulate=True, grad=True)
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), layer_input.to(main_grad.dtype))


@cache
def _transformer_engine_gemm() -> Callable[..., Any] | None:
    """Transformer Engine's ``general_gemm``, or None where it is missing or wants a workspace as it once did."""
    try:
        gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    except Exception:  # a half-built extension raises what it likes
        return None
    return None if "workspace" in inspect.signature(gemm).parameters else gemm

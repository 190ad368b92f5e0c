"""Weight gradients added directly into ``main_grad``, by apex's fused kernel or a plain addmm."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from megatron_pp.errors import FusedWeightGradError


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
    bfloat16. With float32 the products of half-precision inputs are added in float32, with or without apex. Raises
    FusedWeightGradError for other dtypes.
    """
    if main_grad.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise FusedWeightGradError(
            f"main_grad is {main_grad.dtype}; gradient accumulation fusion adds into float32, float16 or bfloat16"
        )
    if kernels is not None:
        wide = main_grad.dtype == torch.float32
        kernel = kernels.wgrad_gemm_accum_fp32 if wide else kernels.wgrad_gemm_accum_fp16
        kernel(layer_input.contiguous(), grad_output.contiguous(), main_grad)
        return
    main_grad.addmm_(grad_output.t().to(main_grad.dtype), layer_input.to(main_grad.dtype))

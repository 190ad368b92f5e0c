"""Linear layers and embeddings with deferred weight gradients. They make the same calls as autograd, so gradients have
the same bits.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_pp.errors import FusedWeightGradError
from megatron_pp.weight_grad.deferred import Deferred, SplitLayer
from megatron_pp.weight_grad.parameter_leaf import assignments

_HALF = (torch.float16, torch.bfloat16)
# Earlier releases cannot add half-precision products to a float32 matrix (pytorch#167931).
_ADDMM_WIDENS = torch.__version__ >= (2, 13)  # type: ignore[operator]


def fused_kernels() -> Any | None:
    """apex's extension module ``fused_weight_gradient_mlp_cuda``. None if the module or a CUDA device is missing. The
    package named apex on PyPI is a different project."""
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
    torch's addmm or by Transformer Engine's GEMM, else after a cast. Raises FusedWeightGradError for other dtypes."""
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
    """Transformer Engine's ``general_gemm``; None if it is missing, or if it needs a workspace as in old releases."""
    try:
        gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    except Exception:  # an incomplete build of the extension may raise anything
        return None
    return None if "workspace" in inspect.signature(gemm).parameters else gemm


@dataclass(slots=True)
class DeferredLinear(Deferred):
    """The gradients of a linear layer with weight [out, in] and bias [out]. Its input is [tokens, in], its output's
    gradient [tokens, out] or, if it is not ``flat``, [..., out]."""

    weight_in_rows: bool = True  # the weight's rows are contiguous (it is not transposed)
    flat: bool = True  # the bias was added to a [tokens, out] output, not to one of more dimensions
    widen: bool = False  # each call's gradient is cast to the parameter's dtype before it is added to others
    group: Any = None  # the input is this rank's part of the tokens, which are split over this process group
    gathering: Gathering | None = None  # the gathering of the input, once it has begun

    def prepare(self) -> None:
        if self.group is not None and self.gathering is None:
            self.gathering = Gathering(self.layer_input, self.group)

    def compute(self, fused: bool = True) -> Iterator[tuple[Tensor, Tensor | None]]:
        layer = self.layer
        grad_output = self.grad_output
        layer_input = self.layer_input
        self.prepare()
        if self.gathering is not None:
            layer_input = self.gathering.wait()
        flat_grad = grad_output if self.flat else grad_output.flatten(0, -2)
        main_grad = getattr(layer.weight, "main_grad", None) if fused and layer.fusion else None
        if main_grad is not None:
            add_weight_grad(layer.kernels, layer_input, flat_grad, main_grad)
            yield layer.weight, None
        elif self.weight_in_rows:
            yield layer.weight, self._widened(flat_grad.t().mm(layer_input), layer.weight)
        else:
            yield layer.weight, self._widened(layer_input.t().mm(flat_grad).t(), layer.weight)
        if layer.bias is not None:
            grad = flat_grad.sum(0) if self.flat else grad_output.sum(tuple(range(grad_output.dim() - 1)))
            yield layer.bias, self._widened(grad, layer.bias)

    def _widened(self, grad: Tensor, parameter: Tensor) -> Tensor:
        return grad.to(parameter.dtype) if self.widen else grad


class Gathering:
    """An all-gather that has started, of a tensor that is split over ``group`` along the first dimension."""

    def __init__(self, part: Tensor, group: Any) -> None:
        self._whole = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
        self._part = part.contiguous()  # must live until it is sent
        self._work: Any = dist.all_gather_into_tensor(self._whole, self._part, group=group, async_op=True)

    def wait(self) -> Tensor:
        self._work.wait()
        return self._whole


class _SplitLinear(torch.autograd.Function):
    """A linear layer. In a backward of a pipeline step it returns the input gradient, and queues the weight and bias
    gradients in the store. Every other backward returns all gradients, and can be differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, _: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLayer, widen: bool
    ) -> Tensor:
        flat = layer_input.dim() == 2 or layer_input.is_contiguous()
        ctx.layer = layer
        ctx.form = (weight.stride() == (weight.shape[1], 1), flat, widen)
        ctx.set_materialize_grads(False)
        # The weight is saved only for an input gradient, as in autograd: otherwise it may be changed in place.
        saved = (weight, weight.detach()) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(layer_input, *saved)
        return F.linear(layer_input, weight, bias).data  # not a view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 6
        layer_input, weight, weight_data = ctx.saved_tensors
        layer = ctx.layer
        shape = layer_input.shape
        flat = ctx.form[1]
        if torch.is_grad_enabled():
            layer.store.keep_whole(layer, "its gradient is differentiated again")
        else:  # detached: otherwise the input's graph would keep the stage's input and its gradient until W
            layer_input = layer_input.detach()
            weight = weight_data
        flat_input = layer_input.flatten(0, -2)
        flat_grad = grad_output.flatten(0, -2)
        grad_input = None
        if weight is not None:
            grad_input = _input_grad(flat_input, flat_grad, weight).reshape(shape)
        deferred = DeferredLinear(layer, flat_input, flat_grad if flat else grad_output, *ctx.form)
        return grad_input, None, *deferred.leave_or_compute(), None, None


# apply() without its wrapper for torch.func's transforms.
_apply_linear: Any = super(torch.autograd.Function, _SplitLinear).apply


def _input_grad(flat_input: Tensor, flat_grad: Tensor, weight: Tensor) -> Tensor:
    """The input gradient. The calls are autograd's own, so the bits are the same."""
    if flat_input.stride(0) == 1 and flat_input.stride(1) == flat_input.shape[0]:
        return weight.t().mm(flat_grad.t()).t()
    return flat_grad.mm(weight)


def split_linear(layer_input: Tensor, layer: SplitLayer, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of an input of at least two dimensions [..., in], under autocast too. ``weight`` and ``bias`` are
    the leaves of the layer's parameters, or parameters without a gradient."""
    device = layer_input.device.type
    widen = False
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        casts = layer.store.casts
        layer_input = casts.cast(layer_input, dtype)
        weight = casts.cast(weight, dtype)
        bias = None if bias is None else casts.cast(bias, dtype)
        widen = not torch.is_autocast_cache_enabled()
    return _apply_linear(layer_input, layer.store.anchor, weight, bias, layer, widen)


class Casts:
    """Casts tensors as autocast does; float64 is not cast. All users of a leaf that requires a gradient share one cast,
    so their gradients are added in the lower precision. The casts are cleared at each backward; graphs hold those that
    they need."""

    def __init__(self) -> None:
        # A cast keeps its leaf alive, so the leaf's id stays unique. Stored with the state of the leaf at that time.
        self._shared: dict[tuple[int, torch.dtype], tuple[Tensor, tuple[int, int]]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is dtype or tensor.dtype is torch.float64 or not tensor.is_floating_point():
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        key = (id(tensor), dtype)
        state = (tensor._version, assignments(tensor))
        found = self._shared.get(key)
        if found is None or found[1] != state:
            found = self._shared[key] = tensor.to(dtype), state
        return found[0]

    def clear(self) -> None:
        self._shared.clear()


@dataclass(slots=True)
class DeferredEmbedding(Deferred):
    """The weight gradient of one look-up in a weight [rows, width]. Its input is the indices. ``options`` are those of
    the look-up."""

    padding_idx: int | None
    scale_grad_by_freq: bool

    def compute(self, fused: bool = True) -> Iterator[tuple[Tensor, Tensor | None]]:
        weight = self.layer.weight
        padding = -1 if self.padding_idx is None else self.padding_idx
        backward = torch.ops.aten.embedding_dense_backward
        yield weight, backward(self.grad_output, self.layer_input, weight.shape[0], padding, self.scale_grad_by_freq)


class SplitEmbedding(torch.autograd.Function):
    """``F.embedding`` without max_norm or sparse gradients; its whole backward is a weight gradient. ``weight`` is the
    leaf of the layer's weight, ``options`` are padding_idx and scale_grad_by_freq."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, _: Tensor, weight: Tensor, layer: SplitLayer, *options: Any) -> Tensor:
        ctx.layer = layer
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight, options[0]).data  # as above

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        weight_grad = None
        if grad_output is not None:
            (indices,), layer = ctx.saved_tensors, ctx.layer
            if torch.is_grad_enabled():
                layer.store.keep_whole(layer, "its gradient is differentiated again")
            weight_grad, _ = DeferredEmbedding(layer, indices, grad_output, *ctx.options).leave_or_compute()
        return None, None, weight_grad, None, None, None


class SplitTensorParallelLinear(torch.autograd.Function):
    """The input gradient is all-reduced or, with sequence parallelism, reduce-scattered over the tensor-parallel group
    in the backward. The input is gathered again in W, which all ranks of the group run in the same order, while the
    weight gradient before it is computed; where a backward is whole, while the input gradient is computed, as in
    Megatron.

    What Megatron's ``_forward_impl`` computes: [sequence, batch, in / tp or in] -> [sequence, batch, out or out /
    tp], of an expert [tokens, in] -> [tokens, out]. ``weight`` and ``bias`` are the leaves of the layer's."""

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, _: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLayer, *call: Any
    ) -> Tensor:
        """``call``: Megatron's allreduce_dgrad, sequence_parallel and tp_group."""
        ctx.layer = layer
        ctx.call = call
        ctx.save_for_backward(layer_input, weight)
        sequence_parallel, group = call[1:]
        whole = Gathering(layer_input, group).wait() if sequence_parallel else layer_input
        output = torch.matmul(whole, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layer_input, weight = ctx.saved_tensors
        allreduce_dgrad, sequence_parallel, group = ctx.call
        flat_input = layer_input.detach().flatten(0, -2)
        flat_grad = grad_output.flatten(0, -2)
        deferred = DeferredLinear(ctx.layer, flat_input, flat_grad, group=group if sequence_parallel else None)
        if sequence_parallel and not deferred.is_put_off():
            deferred.prepare()
        grad_input = grad_output.matmul(weight) if ctx.needs_input_grad[0] else None
        pending = None
        if grad_input is not None and sequence_parallel:
            whole, grad_input = grad_input, torch.empty_like(layer_input)
            pending = dist.reduce_scatter_tensor(grad_input, whole.contiguous(), group=group, async_op=True)
        elif grad_input is not None and allreduce_dgrad:
            pending = dist.all_reduce(grad_input, group=group, async_op=True)
        grads = deferred.leave_or_compute()
        if pending is not None:
            pending.wait()
        return grad_input, None, *grads, *[None] * 4

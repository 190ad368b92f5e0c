"""Linear layers and embeddings with deferred weight gradients, by autograd's own formulas: the same calls give the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pp.weight_grad.deferred import Deferred, SplitLayer
from megatron_pp.weight_grad.fused import add_weight_grad


@dataclass(slots=True)
class LinearParameters(SplitLayer):
    """Weight [out, in] of a linear layer, and its bias [out] where that is trained.

    fusion   add weight gradients into ``main_grad`` by one kernel (Megatron's gradient_accumulation_fusion)
    kernels  apex's kernels, or None
    """

    bias: Tensor | None
    fusion: bool = False
    kernels: Any = None
    trained: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.trained = (self.weight,) if self.bias is None else (self.weight, self.bias)


class LinearForm(NamedTuple):
    """The layouts by which autograd chooses its calls for a linear layer's gradients.

    weight_in_rows  the weight's rows are contiguous (it is not transposed)
    flat            the bias was added to [tokens, out], not to an output of more dimensions
    widen           each call's gradient is cast to the parameter's dtype before it is added to others
    """

    weight_in_rows: bool
    flat: bool
    widen: bool = False


@dataclass(slots=True)
class DeferredLinear(Deferred):
    """Of a linear layer: its input is [tokens, in], its output's gradient [tokens, out] or, where the form is not flat,
    [..., out].
    """

    layer: LinearParameters
    form: LinearForm

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        layer, grad_output = self.layer, self.grad_output
        weight, bias = layer.weight, layer.bias
        flat_grad = grad_output if self.form.flat else grad_output.flatten(0, -2)
        main_grad = getattr(weight, "main_grad", None) if layer.fusion else None
        if main_grad is not None:
            add_weight_grad(layer.kernels, self.layer_input, flat_grad, main_grad)
            yield weight, None
        else:
            yield weight, self._cast(self._weight_grad(flat_grad), weight)
        if bias is not None:
            grad = flat_grad.sum(0) if self.form.flat else grad_output.sum(tuple(range(grad_output.dim() - 1)))
            yield bias, self._cast(grad, bias)

    def _weight_grad(self, flat_grad: Tensor) -> Tensor:
        """Autograd's own calls, to the same bits."""
        if self.form.weight_in_rows:
            return flat_grad.t().mm(self.layer_input)
        return self.layer_input.t().mm(flat_grad).t()

    def _cast(self, grad: Tensor, parameter: Tensor) -> Tensor:
        return grad.to(parameter.dtype) if self.form.widen else grad


def gradients_now(deferred: DeferredLinear, fused: bool) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias gradient for autograd; ``fused``: the weight's may go into ``main_grad`` instead."""
    if not fused:
        deferred = replace(deferred, layer=replace(deferred.layer, fusion=False))
    grads = [grad for _, grad in deferred.compute()]
    return grads[0], grads[1] if len(grads) == 2 else None


class _SplitLinear(torch.autograd.Function):
    """Linear layer: in a pipeline backward it returns the input gradient and queues the rest in the store. Every other
    backward returns all gradients, and can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer_input: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: LinearParameters,
        widen: bool,
    ) -> Tensor:
        flat = layer_input.dim() == 2 or layer_input.is_contiguous()
        ctx.layer, ctx.form = layer, LinearForm(weight.stride() == (weight.shape[1], 1), flat, widen)
        ctx.set_materialize_grads(False)
        # As autograd: where no input gradient needs the weight, it may be changed in place or assigned other data.
        saved = (weight, weight.detach()) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(layer_input, *saved)
        return F.linear(layer_input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 6
        layer_input, weight, weight_data = ctx.saved_tensors
        layer, shape = ctx.layer, layer_input.shape
        if torch.is_grad_enabled():
            layer.store.keep_whole(layer, "its gradient is differentiated again")
        else:  # undetached, the input's graph would keep the stage's input and its gradient until W
            layer_input, weight = layer_input.detach(), weight_data
        flat_input, flat_grad, grad_input = layer_input.flatten(0, -2), grad_output.flatten(0, -2), None
        if weight is not None:
            grad_input = _input_grad(flat_input, flat_grad, weight).reshape(shape)
        deferred = DeferredLinear(layer, flat_input, flat_grad if ctx.form.flat else grad_output, ctx.form)
        current = layer.store.running()
        if current is None or not current.puts_off(layer.weight):
            return grad_input, None, *gradients_now(deferred, fused=current is not None), None, None
        layer.store.leave(deferred)
        return grad_input, None, None, None, None, None


_apply_linear: Any = super(torch.autograd.Function, _SplitLinear).apply  # less a wrapper for torch.func's transforms


def _input_grad(flat_input: Tensor, flat_grad: Tensor, weight: Tensor) -> Tensor:
    """Autograd's own calls, to the same bits."""
    if flat_input.stride(0) == 1 and flat_input.stride(1) == flat_input.shape[0]:
        return weight.t().mm(flat_grad.t()).t()
    return flat_grad.mm(weight)


def split_linear(layer_input: Tensor, layer: LinearParameters, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of an input of at least two dimensions [..., in], under autocast too. ``weight`` and ``bias`` are
    the leaves of the layer's parameters, or parameters without a gradient.
    """
    device = layer_input.device.type
    widen = False
    if torch.is_autocast_enabled(device):
        dtype, casts = torch.get_autocast_dtype(device), layer.store.casts
        layer_input, weight = casts.cast(layer_input, dtype), casts.cast(weight, dtype)
        bias = None if bias is None else casts.cast(bias, dtype)
        widen = not torch.is_autocast_cache_enabled()
    result: Tensor = _apply_linear(layer_input, layer.store.anchor, weight, bias, layer, widen)
    return result


@dataclass(slots=True)
class EmbeddingParameters(SplitLayer):
    """Weight [rows, width] of an embedding, and options of its gradient."""

    padding_idx: int | None
    scale_grad_by_freq: bool


class DeferredEmbedding(Deferred):
    """Of one look-up; its input is the indices."""

    __slots__ = ()
    layer: EmbeddingParameters

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        layer = self.layer
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        rows = layer.weight.shape[0]
        grad = torch.ops.aten.embedding_dense_backward(
            self.grad_output, self.layer_input, rows, padding, layer.scale_grad_by_freq
        )
        yield layer.weight, grad


class _SplitEmbedding(torch.autograd.Function):
    """Embedding: without an input gradient, so that its whole backward is a weight gradient."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, anchor: Tensor, weight: Tensor, layer: EmbeddingParameters) -> Tensor:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight, layer.padding_idx)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 4
        (indices,) = ctx.saved_tensors
        layer, store = ctx.layer, ctx.layer.store
        if torch.is_grad_enabled():
            store.keep_whole(layer, "its gradient is differentiated again")
        deferred, current = DeferredEmbedding(layer, indices, grad_output), store.running()
        if current is None or not current.puts_off(layer.weight):
            ((_, grad),) = deferred.compute()
            return None, None, grad, None
        store.leave(deferred)
        return None, None, None, None


def split_embedding(indices: Tensor, layer: EmbeddingParameters, weight: Tensor) -> Tensor:
    """``F.embedding`` without max_norm or sparse gradients; ``weight`` is the leaf of the layer's."""
    result: Tensor = _SplitEmbedding.apply(indices, layer.store.anchor, weight, layer)
    return result

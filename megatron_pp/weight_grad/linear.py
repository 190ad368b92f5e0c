"""Linear layers and embeddings whose weight gradient can be put off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_pp.weight_grad.fused import add_weight_grad
from megatron_pp.weight_grad.store import WeightGradStore


@dataclass(frozen=True)
class LinearParameters:
    """Weight [out, in] and bias [out] or None of a linear layer, out of autograd's sight.

    fusion   add weight gradients into ``main_grad`` by one kernel (Megatron's gradient_accumulation_fusion)
    kernels  apex's kernels, or None
    """

    store: WeightGradStore
    weight: Tensor
    bias: Tensor | None
    fusion: bool = False
    kernels: Any = None


@dataclass(frozen=True)
class DeferredLinear:
    """Weight and bias gradients of one call of a linear layer: keeps its input and output gradient, [tokens, in] and
    [tokens, out].
    """

    layer: LinearParameters
    layer_input: Tensor
    grad_output: Tensor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        both = (self.layer.weight, self.layer.bias)
        return tuple(p for p in both if p is not None and p.requires_grad)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.layer_input, self.grad_output

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        layer, layer_input, grad_output = self.layer, self.layer_input, self.grad_output
        weight, bias = layer.weight, layer.bias
        if weight.requires_grad:
            main_grad = getattr(weight, "main_grad", None)
            if layer.fusion and main_grad is not None:
                add_weight_grad(layer.kernels, layer_input, grad_output, main_grad)
                yield weight, None
            else:
                yield weight, grad_output.t().mm(layer_input)  # autograd's own call, to the same bits
        if bias is not None and bias.requires_grad:
            yield bias, grad_output.sum(0)


class _SplitLinear(torch.autograd.Function):
    """Linear layer: backward gives the input gradient and leaves the rest with the store."""

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, layer: LinearParameters
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(layer_input, weight)
        return F.linear(layer_input, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        layer_input, weight = ctx.saved_tensors
        flat_grad = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = flat_grad.mm(weight).view(layer_input.shape)
        # Detached: its graph would keep the stage's input and the gradient of that alive until W.
        flat_input = layer_input.detach().reshape(-1, layer_input.shape[-1])
        ctx.layer.store.leave(DeferredLinear(ctx.layer, flat_input, flat_grad))
        return grad_input, None, None, None, None


def split_linear(layer_input: Tensor, layer: LinearParameters) -> Tensor:
    """``F.linear`` of an input of at least two dimensions [..., in], under autocast too."""
    # Casts stay in autograd's graph for the input; the weight's gradient is cast back where it is added.
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    device = layer_input.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        layer_input, weight = layer_input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return _SplitLinear.apply(layer_input, layer.store.anchor, weight, bias, layer)
    return _SplitLinear.apply(layer_input, layer.store.anchor, weight, bias, layer)


@dataclass(frozen=True)
class EmbeddingParameters:
    """Weight [rows, width] of an embedding, and how its gradient is made."""

    store: WeightGradStore
    weight: Tensor
    padding_idx: int | None
    scale_grad_by_freq: bool


@dataclass(frozen=True)
class DeferredEmbedding:
    """The weight gradient of one look-up: keeps the indices and the output gradient."""

    layer: EmbeddingParameters
    indices: Tensor
    grad_output: Tensor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.layer.weight,)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.indices, self.grad_output

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        layer = self.layer
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        rows = layer.weight.shape[0]
        grad = torch.ops.aten.embedding_dense_backward(
            self.grad_output, self.indices, rows, padding, layer.scale_grad_by_freq
        )
        yield layer.weight, grad


class _SplitEmbedding(torch.autograd.Function):
    """Embedding: it has no input gradient, so that its whole backward is a weight gradient."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, anchor: Tensor, weight: Tensor, layer: EmbeddingParameters) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight, layer.padding_idx)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, None, None]:
        (indices,) = ctx.saved_tensors
        ctx.layer.store.leave(DeferredEmbedding(ctx.layer, indices, grad_output))
        return None, None, None, None


def split_embedding(indices: Tensor, layer: EmbeddingParameters) -> Tensor:
    """``F.embedding`` without max_norm or sparse gradients."""
    return _SplitEmbedding.apply(indices, layer.store.anchor, layer.weight.detach(), layer)

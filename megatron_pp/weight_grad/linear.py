"""Linear layers and embeddings with deferred weight gradients, by autograd's own formulas: the same calls give the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_pp.weight_grad.deferred import Deferred, SplitLayer
from megatron_pp.weight_grad.fused import add_weight_grad
from megatron_pp.weight_grad.parameter_leaf import assignments


@dataclass(slots=True)
class DeferredLinear(Deferred):
    """Of a linear layer with weight [out, in] and bias [out]; its input is [tokens, in], its output's gradient
    [tokens, out] or, where it is not ``flat``, [..., out].
    """

    weight_in_rows: bool = True  # the weight's rows are contiguous (it is not transposed)
    flat: bool = True  # the bias was added to [tokens, out], not to an output of more dimensions
    widen: bool = False  # each call's gradient is cast to the parameter's dtype before it is added to others
    group: Any = None  # the input is this rank's part of the tokens, which are split over this process group
    gathering: Gathering | None = None  # of the input, where it has begun

    def prepare(self) -> None:
        if self.group is not None and self.gathering is None:
            self.gathering = Gathering(self.layer_input, self.group)

    def compute(self, fused: bool = True) -> Iterator[tuple[Tensor, Tensor | None]]:
        layer, grad_output, layer_input = self.layer, self.grad_output, self.layer_input
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
    """The all-gather of what is split over ``group`` along the first dimension, begun."""

    def __init__(self, part: Tensor, group: Any) -> None:
        self._whole = part.new_empty((part.shape[0] * dist.get_world_size(group), *part.shape[1:]))
        self._part = part.contiguous()  # kept until it is sent
        self._work: Any = dist.all_gather_into_tensor(self._whole, self._part, group=group, async_op=True)

    def wait(self) -> Tensor:
        """The whole."""
        self._work.wait()
        return self._whole


class _SplitLinear(torch.autograd.Function):
    """Linear layer: in a pipeline backward it returns the input gradient and queues the rest in the store. Every other
    backward returns all gradients, and can be differentiated again.
    """

    @staticmethod
    def forward(
        ctx: Any, layer_input: Tensor, _: Tensor, weight: Tensor, bias: Tensor | None, layer: SplitLayer, widen: bool
    ) -> Tensor:
        flat = layer_input.dim() == 2 or layer_input.is_contiguous()
        ctx.layer, ctx.form = layer, (weight.stride() == (weight.shape[1], 1), flat, widen)
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
        layer, shape, flat = ctx.layer, layer_input.shape, ctx.form[1]
        if torch.is_grad_enabled():
            layer.store.keep_whole(layer, "its gradient is differentiated again")
        else:  # undetached, the input's graph would keep the stage's input and its gradient until W
            layer_input, weight = layer_input.detach(), weight_data
        flat_input, flat_grad, grad_input = layer_input.flatten(0, -2), grad_output.flatten(0, -2), None
        if weight is not None:
            grad_input = _input_grad(flat_input, flat_grad, weight).reshape(shape)
        deferred = DeferredLinear(layer, flat_input, flat_grad if flat else grad_output, *ctx.form)
        return grad_input, None, *deferred.leave_or_compute(), None, None


_apply_linear: Any = super(torch.autograd.Function, _SplitLinear).apply  # less a wrapper for torch.func's transforms


def _input_grad(flat_input: Tensor, flat_grad: Tensor, weight: Tensor) -> Tensor:
    """Autograd's own calls, to the same bits."""
    if flat_input.stride(0) == 1 and flat_input.stride(1) == flat_input.shape[0]:
        return weight.t().mm(flat_grad.t()).t()
    return flat_grad.mm(weight)


def split_linear(layer_input: Tensor, layer: SplitLayer, weight: Tensor, bias: Tensor | None) -> Tensor:
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


class Casts:
    """Casts as autocast does: float64 stays, and all users of a leaf that requires a gradient share one cast, so that
    their gradients are added in the lower precision. Cleared at each backward; graphs hold what they need.
    """

    def __init__(self) -> None:
        # A cast keeps its leaf alive, and so the leaf's id. With it, the state of the leaf when it was made.
        self._shared: dict[tuple[int, torch.dtype], tuple[Tensor, tuple[int, int]]] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is dtype or tensor.dtype is torch.float64 or not tensor.is_floating_point():
            return tensor
        if not (tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        key, state = (id(tensor), dtype), (tensor._version, assignments(tensor))
        found = self._shared.get(key)
        if found is None or found[1] != state:
            found = self._shared[key] = tensor.to(dtype), state
        return found[0]

    def clear(self) -> None:
        self._shared.clear()


@dataclass(slots=True)
class DeferredEmbedding(Deferred):
    """Of one look-up in a weight [rows, width]; its input is the indices, the options are those of the look-up."""

    padding_idx: int | None
    scale_grad_by_freq: bool

    def compute(self, fused: bool = True) -> Iterator[tuple[Tensor, Tensor | None]]:
        weight, padding = self.layer.weight, -1 if self.padding_idx is None else self.padding_idx
        backward = torch.ops.aten.embedding_dense_backward
        yield weight, backward(self.grad_output, self.layer_input, weight.shape[0], padding, self.scale_grad_by_freq)


class SplitEmbedding(torch.autograd.Function):
    """``F.embedding`` without max_norm or sparse gradients; its whole backward is a weight gradient. ``weight`` is the
    leaf of the layer's, ``options`` are padding_idx and scale_grad_by_freq.
    """

    @staticmethod
    def forward(ctx: Any, indices: Tensor, _: Tensor, weight: Tensor, layer: SplitLayer, *options: Any) -> Tensor:
        ctx.layer, ctx.options = layer, options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        return F.embedding(indices, weight, options[0])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        weight_grad = None
        if grad_output is not None:
            (indices,), layer = ctx.saved_tensors, ctx.layer
            if torch.is_grad_enabled():
                layer.store.keep_whole(layer, "its gradient is differentiated again")
            weight_grad, _ = DeferredEmbedding(layer, indices, grad_output, *ctx.options).leave_or_compute()
        return None, None, weight_grad, None, None, None

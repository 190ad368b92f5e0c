"""The split form of Megatron-core's GroupedMLP, whose experts' weights are two matrices that ``grouped_gemm`` takes.

Its forward runs as it is; only ``grouped_gemm.ops.gmm`` is in split form, with the products of the library's own
backward: ``grouped_gemm.backend.gmm``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_pp.weight_grad.deferred import Deferred, SplitLayer
from megatron_pp.weight_grad.parameter_leaf import parameter_behind

_EXPERTS = "megatron.core.transformer.moe.experts"
_LIBRARY = "gg"  # the name under which that module has grouped_gemm
NewLayer = Callable[[Tensor, Tensor | None], SplitLayer]


def has_grouped_gemms(layer: nn.Module) -> bool:
    """Whether ``layer`` is Megatron's GroupedMLP, or derived from it without a forward of its own."""
    forward: Any = type(layer).forward
    for base in type(layer).__mro__:
        if base.__module__ == _EXPERTS and base.__name__ == "GroupedMLP":
            its_own: Any = vars(base).get("forward")
            library = getattr(its_own, "__globals__", {}).get(_LIBRARY)
            return forward is its_own and hasattr(getattr(library, "ops", None), "backend")
    return False


def forward_with_split_gemms(
    forward: Any, layer: nn.Module, new_layer: NewLayer, anchor: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call ``forward`` with the library's products in split form. ``new_layer``: the SplitLayer of a weight."""
    ops = forward.__globals__[_LIBRARY].ops
    stand_in = SimpleNamespace(ops=SimpleNamespace(gmm=_SplitGemm(ops, new_layer, anchor)))
    names = {**forward.__globals__, _LIBRARY: stand_in}
    with_it = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    return with_it(layer, *args, **kwargs)


class _SplitGemm:
    """``gmm(a, b, batch_sizes, trans_b)``: rows of ``a`` [tokens, in] times their expert's matrix of ``b``, which is
    [experts, in, out], with ``trans_b`` [experts, out, in], and a view of a weight."""

    def __init__(self, ops: Any, new_layer: NewLayer, anchor: Tensor) -> None:
        self._ops, self._new_layer, self._anchor = ops, new_layer, anchor

    def __call__(self, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
        leaf = b._base
        if leaf is None or parameter_behind(leaf) is leaf or not b.requires_grad:
            whole: Tensor = self._ops.gmm(a, b, batch_sizes, trans_b=trans_b)
            return whole
        now, shape = self._new_layer(parameter_behind(leaf), None), b.shape
        call = (now, self._ops.backend.gmm, shape, batch_sizes, trans_b)
        product: Tensor = _Product.apply(a, self._anchor, leaf, *call)
        return product


@dataclass(slots=True)
class DeferredProduct(Deferred):
    gmm: Any
    batch_sizes: Tensor
    trans_b: bool

    def compute(self, fused: bool = True) -> Iterator[tuple[Tensor, Tensor | None]]:
        weight, pair = self.layer.weight, (self.layer_input, self.grad_output)
        grad = self.gmm(*(pair[::-1] if self.trans_b else pair), self.batch_sizes, trans_a=True, trans_b=False)
        yield weight, grad.view(weight.shape)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, _: Tensor, leaf: Tensor, layer: SplitLayer, *call: Any) -> Tensor:
        """``leaf``: of the weight; ``call``: the library's product, the shape it takes, batch_sizes and trans_b."""
        gmm, shape, batch_sizes, trans_b = call
        ctx.layer, ctx.call = layer, call
        ctx.save_for_backward(a, leaf)
        product: Tensor = gmm(a, leaf.view(shape), batch_sizes, trans_a=False, trans_b=trans_b)
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        a, leaf = ctx.saved_tensors
        gmm, shape, batch_sizes, trans_b = ctx.call
        grad_output, grad_input = grad_output.contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_input = gmm(grad_output, leaf.view(shape), batch_sizes, trans_a=False, trans_b=not trans_b)
        deferred = DeferredProduct(ctx.layer, a.detach(), grad_output, gmm, batch_sizes, trans_b)
        weight_grad, _ = deferred.leave_or_compute()
        return grad_input, None, weight_grad, *[None] * 5

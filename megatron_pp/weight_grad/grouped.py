"""The split form of Megatron-core's GroupedMLP, whose experts' weights are two matrices that ``grouped_gemm`` takes.

Its forward runs as it is; only ``grouped_gemm.ops.gmm`` is in split form. Both halves of a product's backward are the
library's own: an inner graph of that one product is asked for the input's gradient in B, and for the weight's in W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

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
            found: Any = vars(base).get("forward")
            return forward is found and _LIBRARY in found.__code__.co_names
    return False


def forward_with_split_gemms(
    forward: Any, layer: nn.Module, new_layer: NewLayer, anchor: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call ``forward`` with the library's products in split form. ``new_layer``: the SplitLayer of a weight."""
    library = forward.__globals__[_LIBRARY]
    stand_in = SimpleNamespace(ops=SimpleNamespace(gmm=_SplitGemm(library.ops.gmm, new_layer, anchor)))
    names = {**forward.__globals__, _LIBRARY: stand_in}
    with_it = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    return with_it(layer, *args, **kwargs)


class _SplitGemm:
    """``gmm(a, b, batch_sizes, trans_b)``: rows of ``a`` [tokens, in] times their expert's of ``b`` [experts, in, out],
    where ``b`` is a view of a weight.
    """

    def __init__(self, gmm: Callable[..., Tensor], new_layer: NewLayer, anchor: Tensor) -> None:
        self._gmm, self._new_layer, self._anchor = gmm, new_layer, anchor

    def __call__(self, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
        leaf = b._base
        weight = leaf if leaf is None else parameter_behind(leaf)
        if weight is leaf or not b.requires_grad:
            return self._gmm(a, b, batch_sizes, trans_b=trans_b)
        now = self._new_layer(weight, None)  # type: ignore[arg-type]
        product: Tensor = _Product.apply(a, self._anchor, leaf, now, self._gmm, b.shape, batch_sizes, trans_b)
        return product


@dataclass(slots=True)
class DeferredProduct(Deferred):
    """Of one grouped product."""

    experts: Tensor  # the weight in the shape of the product
    product: GradientEdge

    def compute(self, fused: bool = True) -> Iterator[tuple[Tensor, Tensor | None]]:
        (grad,) = torch.autograd.grad(self.product, self.experts, self.grad_output)
        yield self.layer.weight, grad.view(self.layer.weight.shape)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, _: Tensor, leaf: Tensor, layer: SplitLayer, gmm: Any, shape: Any, *more: Any
    ) -> Tensor:
        """``leaf``: of the weight; ``more``: batch_sizes and trans_b."""
        batch_sizes, trans_b = more
        with torch.enable_grad():
            inner, experts = a.detach().requires_grad_(), leaf.detach().view(shape).requires_grad_()
            product = gmm(inner, experts, batch_sizes, trans_b=trans_b)
        ctx.layer, ctx.inner, ctx.experts, ctx.product = layer, inner, experts, get_gradient_edge(product)
        return product.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_input = None
        if ctx.needs_input_grad[0]:
            (grad_input,) = torch.autograd.grad(ctx.product, ctx.inner, grad_output, retain_graph=True)
        deferred = DeferredProduct(ctx.layer, ctx.inner.detach(), grad_output, ctx.experts, ctx.product)
        weight_grad, _ = deferred.leave_or_compute()
        return grad_input, None, weight_grad, *[None] * 5

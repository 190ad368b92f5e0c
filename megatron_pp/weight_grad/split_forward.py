"""The forwards that converted layers run in place of their own, and the choice of layers that have one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from megatron_pp.weight_grad.deferred import Deferred, SplitLayer
from megatron_pp.weight_grad.linear import SplitEmbedding, SplitTensorParallelLinear, split_linear
from megatron_pp.weight_grad.parameter_leaf import parameter_behind
from megatron_pp.weight_grad.store import WeightGradStore
from megatron_pp.weight_grad.transformer_engine import SwitchedQueue

_EXPERTS = "megatron.core.transformer.moe.experts"
_LIBRARY = "gg"  # the name under which that module has grouped_gemm


def has_grouped_gemms(layer: nn.Module) -> bool:
    """Whether ``layer`` is Megatron's GroupedMLP, or derived from it without a forward of its own."""
    forward: Any = type(layer).forward
    for base in type(layer).__mro__:
        if base.__module__ == _EXPERTS and base.__name__ == "GroupedMLP":
            its_own: Any = vars(base).get("forward")
            library = getattr(its_own, "__globals__", {}).get(_LIBRARY)
            return forward is its_own and hasattr(getattr(library, "ops", None), "backend")
    return False


@dataclass(slots=True)
class DeferredProduct(Deferred):
    gmm: Any
    batch_sizes: Tensor
    trans_b: bool

    def compute(self, fused: bool = True) -> Iterator[tuple[Tensor, Tensor | None]]:
        left = self.layer_input
        right = self.grad_output
        if self.trans_b:
            left, right = right, left
        grad = self.gmm(left, right, self.batch_sizes, trans_a=True, trans_b=False)
        yield self.layer.weight, grad.view(self.layer.weight.shape)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, _: Tensor, leaf: Tensor, layer: SplitLayer, *call: Any) -> Tensor:
        """``leaf``: the weight's leaf; ``call``: the library's product, the weight's shape for it, batch_sizes,
        trans_b."""
        gmm, shape, batch_sizes, trans_b = call
        ctx.layer = layer
        ctx.call = call
        ctx.save_for_backward(a, leaf)
        return gmm(a, leaf.view(shape), batch_sizes, trans_a=False, trans_b=trans_b)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        a, leaf = ctx.saved_tensors
        gmm, shape, batch_sizes, trans_b = ctx.call
        grad_output = grad_output.contiguous()
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = gmm(grad_output, leaf.view(shape), batch_sizes, trans_a=False, trans_b=not trans_b)
        deferred = DeferredProduct(ctx.layer, a.detach(), grad_output, gmm, batch_sizes, trans_b)
        weight_grad, _ = deferred.leave_or_compute()
        return grad_input, None, weight_grad, *[None] * 5


MARK = "_weight_grad_split"
_TENSOR_PARALLEL = "megatron.core.tensor_parallel.layers"
# Arguments of Megatron's _forward_impl that the split form honours. Its main branch has output_dtype too.
_HONOURED = frozenset({
    "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel", "tp_group", "wgrad_deferral_limit",
    "gtp_remat_size",
})  # fmt: skip
Overrides = tuple[tuple[str, Callable[..., Any]], ...]  # (method, its function)


@dataclass(slots=True)
class SplitState:
    """The state of a converted layer, in its attribute ``MARK``."""

    store: WeightGradStore
    name: str
    original: Any  # the class before the conversion
    fusion: bool
    kernels: Any
    switched: SwitchedQueue | None = None  # only for a layer of Transformer Engine

    @property
    def active(self) -> bool:
        """Whether this forward is part of a pipeline step with a backward."""
        return self.store.armed and torch.is_grad_enabled()

    def layer(self, weight: Tensor, bias: Tensor | None, fusion: bool = False) -> SplitLayer:
        """The layer with the parameters of one call."""
        return SplitLayer(self.store, self.name, weight, bias, fusion, self.kernels)


def state_of(layer: Any) -> SplitState:
    return layer.__dict__[MARK]


def overrides_of(layer: nn.Module) -> tuple[Overrides, str]:
    """The methods that split ``layer``, and "". If it is not split: (), and the reason."""
    own = type(layer)
    plain = "weight" in layer._parameters  # False: computed from other parameters (torch.nn.utils.parametrize)
    if isinstance(layer, nn.Linear | nn.Embedding):
        base, forward = (nn.Linear, _linear_forward) if isinstance(layer, nn.Linear) else (nn.Embedding, _look_up)
        if own.forward is not base.forward:
            return (), "its class has a forward of its own"
        if not plain:
            return (), "its weight is computed from other parameters"
        if isinstance(layer, nn.Embedding) and (layer.sparse or layer.max_norm is not None):
            return (), "its gradient is sparse, or its rows are renormalised"
        return (("forward", forward),), ""
    if any(base.__module__ == _TENSOR_PARALLEL and hasattr(base, "_forward_impl") for base in own.__mro__):
        return (("_forward_impl", _tensor_parallel_impl),), ""
    if has_grouped_gemms(layer):
        return (("forward", _grouped_forward),), ""
    return (), "no layer of its class can be split"


# -- torch's layers ----------------------------------------------------------------------------------------------------


def _linear_forward(layer: nn.Linear, input: Tensor) -> Tensor:  # named as torch names it
    state = state_of(layer)
    weight = layer._parameters.get("weight")
    bias = layer._parameters.get("bias")
    if state.active and weight is not None and input.dim() > 1:
        trained = bias if bias is not None and bias.requires_grad else None
        weight_leaf = state.store.leaf_of(weight)
        bias_leaf = bias if trained is None else state.store.leaf_of(bias)
        now = state.layer(weight, trained, state.fusion)
        if _splits(now, input, None if bias is not None and bias_leaf is None else weight_leaf):
            return split_linear(input, now, cast(Tensor, weight_leaf), bias_leaf)
    return cast(Tensor, state.original.forward(layer, input))


def _look_up(layer: nn.Embedding, input: Tensor) -> Tensor:
    state = state_of(layer)
    weight = layer._parameters.get("weight")
    if state.active and weight is not None:
        leaf = state.store.leaf_of(weight)
        now = state.layer(weight, None)
        if _splits(now, input, leaf):
            options = layer.padding_idx, layer.scale_grad_by_freq
            return cast(Tensor, SplitEmbedding.apply(input, state.store.anchor, leaf, now, *options))
    return cast(Tensor, state.original.forward(layer, input))


def _splits(layer: SplitLayer, input: Tensor, leaf: Tensor | None) -> bool:
    """Whether the split form can run this call. If not, its whole backward runs in B."""
    if not layer.weight.requires_grad:
        return False
    why = ""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        why = "it is called within vmap or another transform of torch.func"
    elif leaf is None:
        why = "its weight is not the one that the model had when the step began"
    elif input.layout is not torch.strided or layer.weight.is_complex():
        why = "its tensors are complex, sparse or nested"
    if why:
        layer.store.keep_whole(layer, why)
    return not why


# -- Megatron's layers -------------------------------------------------------------------------------------------------


def _tensor_parallel_impl(layer: nn.Module, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces the method in which both of Megatron's layers multiply."""
    state = state_of(layer)
    parameter = parameter_behind(weight)
    # With a buffer for output gradients Megatron defers the weight gradient itself. If the weight is not a leaf, it
    # belongs to a layer that is not converted, and stays in autograd's graph.
    own = args or kwargs.get("grad_output_buffer") is not None
    if own or not state.active or parameter is weight:
        return cast(Tensor, state.original._forward_impl(layer, input, weight, *args, **kwargs))
    bias = kwargs.get("bias")
    trained = None if bias is None or not bias.requires_grad else parameter_behind(bias)
    now = state.layer(parameter, trained, state.fusion or bool(kwargs.get("gradient_accumulation_fusion")))
    why = why_left_to_megatron(input, kwargs)
    if why:
        state.store.keep_whole(now, why)
        return cast(Tensor, state.original._forward_impl(layer, input, weight, **kwargs))
    call = (kwargs.get(name) for name in ("allreduce_dgrad", "sequence_parallel", "tp_group"))
    return cast(Tensor, SplitTensorParallelLinear.apply(input, state.store.anchor, weight, bias, now, *call))


def why_left_to_megatron(layer_input: Tensor, kwargs: dict[str, Any]) -> str:
    """Why a call of Megatron's ``_forward_impl`` is left to Megatron; empty if it is split."""
    if kwargs.get("gtp_remat_size", 1) != 1:
        return "its weight is sharded (gtp_remat_size)"
    for name, value in kwargs.items():
        if name not in _HONOURED and value is not None and value is not False:
            return f"it is called with {name}"
    if torch.is_autocast_enabled(layer_input.device.type):
        return "it is called under autocast"
    return ""


def _grouped_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces the forward of Megatron's GroupedMLP, whose experts' weights are two matrices for ``grouped_gemm``. The
    forward runs as it is; only ``grouped_gemm.ops.gmm`` is in split form."""
    state = state_of(layer)
    forward = state.original.forward
    if not state.active:
        return forward(layer, *args, **kwargs)
    split_gemm = partial(_split_gemm, forward.__globals__[_LIBRARY].ops, state)
    names = {**forward.__globals__, _LIBRARY: SimpleNamespace(ops=SimpleNamespace(gmm=split_gemm))}
    split = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    return split(layer, *args, **kwargs)


def _split_gemm(
    ops: Any, state: SplitState, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False
) -> Tensor:
    """Rows of ``a`` [tokens, in] times their expert's matrix of ``b``. ``b`` is a view of a weight, and is [experts,
    in, out], or with ``trans_b`` [experts, out, in]. The products in the backward are those of the library's own
    backward."""
    leaf = b._base
    if leaf is None or parameter_behind(leaf) is leaf or not b.requires_grad:
        return ops.gmm(a, b, batch_sizes, trans_b=trans_b)
    layer = state.layer(parameter_behind(leaf), None)
    return _Product.apply(a, state.store.anchor, leaf, layer, ops.backend.gmm, b.shape, batch_sizes, trans_b)

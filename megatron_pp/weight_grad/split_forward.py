"""What a converted layer computes in place of its own forward, and which layers have such a form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from megatron_pp.weight_grad.deferred import SplitLayer
from megatron_pp.weight_grad.grouped import forward_with_split_gemms, has_grouped_gemms
from megatron_pp.weight_grad.linear import SplitEmbedding, SplitTensorParallelLinear, split_linear
from megatron_pp.weight_grad.parameter_leaf import parameter_behind
from megatron_pp.weight_grad.store import WeightGradStore
from megatron_pp.weight_grad.transformer_engine import SwitchedQueue

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
    """What a converted layer carries, under the attribute ``MARK``."""

    store: WeightGradStore
    name: str
    original: Any  # the class before the conversion
    fusion: bool
    kernels: Any
    switched: SwitchedQueue | None = None  # of a layer of Transformer Engine

    @property
    def active(self) -> bool:
        """Whether this forward is part of a pipeline step with a backward."""
        return self.store.armed and torch.is_grad_enabled()

    def layer(self, weight: Tensor, bias: Tensor | None, fusion: bool = False) -> SplitLayer:
        """With the parameters of one call."""
        return SplitLayer(self.store, self.name, weight, bias, fusion, self.kernels)


def state_of(layer: Any) -> SplitState:
    state: SplitState = layer.__dict__[MARK]
    return state


def overrides_of(layer: nn.Module) -> tuple[Overrides, str]:
    """The methods that split ``layer``; or none, and why autograd computes its weight gradient."""
    own = type(layer)
    plain = "weight" in layer._parameters  # else the weight is computed from others (torch.nn.utils.parametrize)
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
    return (), "its class is none that can be split"


# -- torch's layers ----------------------------------------------------------------------------------------------------


def _linear_forward(layer: nn.Linear, input: Tensor) -> Tensor:  # named as torch names it
    state, weight, bias = state_of(layer), layer._parameters.get("weight"), layer._parameters.get("bias")
    if state.active and weight is not None and input.dim() > 1:
        trained = bias if bias is not None and bias.requires_grad else None
        weight_leaf, bias_leaf = state.store.leaf_of(weight), bias if trained is None else state.store.leaf_of(bias)
        now = state.layer(weight, trained, state.fusion)
        if _splits(now, input, None if bias is not None and bias_leaf is None else weight_leaf):
            return split_linear(input, now, cast(Tensor, weight_leaf), bias_leaf)
    return cast(Tensor, state.original.forward(layer, input))


def _look_up(layer: nn.Embedding, input: Tensor) -> Tensor:
    state, weight = state_of(layer), layer._parameters.get("weight")
    if state.active and weight is not None:
        leaf, now = state.store.leaf_of(weight), state.layer(weight, None)
        if _splits(now, input, leaf):
            options = layer.padding_idx, layer.scale_grad_by_freq
            return cast(Tensor, SplitEmbedding.apply(input, state.store.anchor, leaf, now, *options))
    return cast(Tensor, state.original.forward(layer, input))


def _splits(layer: SplitLayer, input: Tensor, leaf: Tensor | None) -> bool:
    """Whether the split form computes what autograd does for this call; otherwise all of its backward is in B."""
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
    """In place of the method in which both of Megatron's layers multiply."""
    state = state_of(layer)
    parameter = parameter_behind(weight)
    # With a buffer for output gradients Megatron defers the weight gradient itself. A weight that is no leaf belongs to
    # a layer that is not converted: it stays in autograd's graph.
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
    """Why a call of Megatron's ``_forward_impl`` is left to Megatron; empty where it is split."""
    if kwargs.get("gtp_remat_size", 1) != 1:
        return "its weight is sharded (gtp_remat_size)"
    for name, value in kwargs.items():
        if name not in _HONOURED and value is not None and value is not False:
            return f"it is called with {name}"
    if torch.is_autocast_enabled(layer_input.device.type):
        return "it is called under autocast"
    return ""


def _grouped_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In place of the forward of Megatron's GroupedMLP."""
    state = state_of(layer)
    if not state.active:
        return state.original.forward(layer, *args, **kwargs)
    return forward_with_split_gemms(state.original.forward, layer, state.layer, state.store.anchor, *args, **kwargs)

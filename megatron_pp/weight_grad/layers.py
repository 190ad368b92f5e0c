"""A converted layer: its class is replaced by a derived class of the same name, whose parameters read as leaves
(``parameter_leaf.py``) during a step and whose forward splits backward.

State dicts do not change; copies and pickles of a converted layer have the original class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from megatron_pp.weight_grad.linear import EmbeddingParameters, LinearParameters, split_embedding, split_linear
from megatron_pp.weight_grad.megatron_linear import TensorParallelCall, split_tensor_parallel_linear
from megatron_pp.weight_grad.parameter_leaf import parameter_behind
from megatron_pp.weight_grad.store import WeightGradStore

MARK = "_weight_grad_split"
Overrides = tuple[tuple[str, Callable[..., Any]], ...]  # (method, its function)
_MEGATRON_LAYERS = "megatron.core.tensor_parallel.layers"


@dataclass(slots=True)
class SplitState:
    """What a converted layer carries, under the attribute ``MARK``."""

    store: WeightGradStore
    name: str
    original: Any  # the class before the conversion
    fusion: bool
    kernels: Any
    last: LinearParameters | None = None

    @property
    def active(self) -> bool:
        """Whether this forward is part of a pipeline step with a backward."""
        return self.store.armed and torch.is_grad_enabled()

    def linear_parameters(self, weight: Tensor, bias: Tensor | None, fusion: bool) -> LinearParameters:
        """Those of the last call, unless a parameter or ``fusion`` differs."""
        last = self.last
        if last is None or last.weight is not weight or last.bias is not bias or last.fusion != fusion:
            last = self.last = LinearParameters(self.store, self.name, weight, bias, fusion, self.kernels)
        return last


class LeafAttribute:
    """Class attribute in place of a parameter: the parameter, or in a pipeline step its leaf."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer is None:
            return self
        parameters = layer.__dict__["_parameters"]
        if self.name not in parameters:
            raise AttributeError(f"{type(layer).__name__!r} object has no attribute {self.name!r}")
        parameter = parameters[self.name]
        store = state_of(layer).store
        leaf = store.leaf_of(parameter) if store.armed else None
        return parameter if leaf is None else leaf


def state_of(layer: Any) -> SplitState:
    return layer.__dict__[MARK]


def is_converted(layer: nn.Module) -> bool:
    return MARK in layer.__dict__


def convert(layer: nn.Module, state: SplitState) -> bool:
    """Give ``layer`` the derived class. Returns whether its weight gradients are deferred."""
    overrides = _overrides_of(layer)
    layer.__dict__[MARK] = state
    layer.__class__ = _derived(state.original, overrides, tuple(layer._parameters))
    return bool(overrides)


def restore(layer: nn.Module) -> None:
    """Give a converted layer its own class back."""
    layer.__class__ = layer.__dict__.pop(MARK).original


@cache
def _derived(original: Any, overrides: Overrides, names: tuple[str, ...]) -> Any:
    """One base only: Python lets an object change to a class of the same layout, and more bases may change that."""
    attributes: dict[str, Any] = {name: LeafAttribute(name) for name in names}
    attributes |= {"__module__": original.__module__, "__reduce_ex__": _reduce_as_original, **dict(overrides)}
    return type(original)(original.__name__, (original,), attributes)


# -- methods of derived classes ----------------------------------------------------------------


def _reduce_as_original(layer: nn.Module, protocol: Any) -> Any:
    state = {name: value for name, value in layer.__dict__.items() if name != MARK}
    return _bare, (state_of(layer).original,), state


def _bare(original: Any) -> nn.Module:
    """An empty layer, as unpickling starts from."""
    return original.__new__(original)


def _linear_forward(layer: nn.Linear, input: Tensor) -> Tensor:  # named as torch names it
    state = state_of(layer)
    store = state.store
    if store.armed and torch.is_grad_enabled() and input.dim() > 1:
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        trained = bias if bias is not None and bias.requires_grad else None
        weight_leaf, bias_leaf = store.leaf_of(weight), bias if trained is None else store.leaf_of(bias)
        if weight is not None:
            now = state.linear_parameters(weight, trained, state.fusion)
            if _splits(now, input, None if bias is not None and bias_leaf is None else weight_leaf):
                return split_linear(input, now, cast(Tensor, weight_leaf), bias_leaf)
    return state.original.forward(layer, input)


def _embedding_forward(layer: nn.Embedding, input: Tensor) -> Tensor:
    state = state_of(layer)
    if state.active:
        weight = layer._parameters.get("weight")
        leaf = state.store.leaf_of(weight)
        if weight is not None:
            options = layer.padding_idx, layer.scale_grad_by_freq
            now = EmbeddingParameters(state.store, state.name, weight, *options)
            if _splits(now, input, leaf):
                return split_embedding(input, now, cast(Tensor, leaf))
    return state.original.forward(layer, input)


def _splits(layer: LinearParameters | EmbeddingParameters, input: Tensor, leaf: Tensor | None) -> bool:
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


def _tensor_parallel_impl(layer: nn.Module, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In place of the method in which both of Megatron's layers multiply."""
    state = state_of(layer)
    parameter = parameter_behind(weight)
    call = None if args else TensorParallelCall.of(kwargs)
    # A weight that is no leaf belongs to a layer that is not converted: it stays in autograd's graph.
    if call is None or not state.active or parameter is weight:
        return state.original._forward_impl(layer, input, weight, *args, **kwargs)
    bias = kwargs.get("bias")
    trained = None if bias is None or not bias.requires_grad else parameter_behind(bias)
    parameters = state.linear_parameters(parameter, trained, call.gradient_accumulation_fusion)
    return split_tensor_parallel_linear(input, parameters, call, weight, bias)


def _overrides_of(layer: nn.Module) -> Overrides:
    """The methods that split ``layer``; none for classes with a forward of their own, which autograd handles."""
    own = type(layer)
    plain = "weight" in layer._parameters  # else the weight is computed from others (torch.nn.utils.parametrize)
    if isinstance(layer, nn.Linear) and own.forward is nn.Linear.forward and plain:
        return (("forward", _linear_forward),)
    if isinstance(layer, nn.Embedding) and own.forward is nn.Embedding.forward and plain:
        # Autograd handles sparse gradients and renormalised rows.
        return () if layer.sparse or layer.max_norm is not None else (("forward", _embedding_forward),)
    if any(base.__module__ == _MEGATRON_LAYERS and hasattr(base, "_forward_impl") for base in own.__mro__):
        return (("_forward_impl", _tensor_parallel_impl),)
    return ()

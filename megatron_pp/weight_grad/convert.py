"""``split_weight_grad``: convert a rank's model chunks, once, before the first step.

A converted layer's class is replaced by a derived class of the same name, whose parameters read as leaves
(``parameter_leaf.py``) during a step and whose forward splits backward. State dicts do not change; copies and pickles
of a converted layer have the original class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.errors import WeightGradSplitError
from megatron_pp.module_attributes import wrapped_attribute
from megatron_pp.weight_grad.deferred import SplitLayer
from megatron_pp.weight_grad.fused import fused_kernels
from megatron_pp.weight_grad.linear import SplitEmbedding, split_linear
from megatron_pp.weight_grad.megatron_linear import SplitTensorParallelLinear
from megatron_pp.weight_grad.parameter_leaf import parameter_behind
from megatron_pp.weight_grad.store import SplitReport, WeightGradStore
from megatron_pp.weight_grad.transformer_engine import delayed_names, delays_weight_grad

_STORE = "_weight_grad_store"
_MARK = "_weight_grad_split"
_MEGATRON_LAYERS = "megatron.core.tensor_parallel.layers"
Overrides = tuple[tuple[str, Callable[..., Any]], ...]  # (method, its function)


def split_weight_grad(
    model: nn.Module | Sequence[nn.Module], gradient_accumulation_fusion: bool | None = None
) -> WeightGradStore:
    """Convert a model chunk, or the list of a rank's chunks, so that backward can be split; returns their store.

    torch's ``Linear`` and ``Embedding``, Megatron-core's tensor-parallel linear layers and Transformer Engine's layers
    built with ``delay_wgrad_compute`` defer their weight gradients; every other layer computes all gradients at once.
    Parameters, state dicts, hooks and wrappers (DistributedDataParallel before or after) do not change.

    ``gradient_accumulation_fusion``: one kernel (apex's where it can be imported) adds weight gradients into
    ``main_grad``. The default is the field of the model's ``config``.

    Raises WeightGradSplitError for a model that is converted already, or that contains TorchScript.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    store = WeightGradStore()
    counts = {"split": 0, "delayed": 0, "whole": 0}
    for chunk in chunks:
        _check(chunk)
    for number, chunk in enumerate(chunks):
        fusion = gradient_accumulation_fusion
        if fusion is None:
            fusion = bool(getattr(wrapped_attribute(chunk, "config"), "gradient_accumulation_fusion", False))
        for name, layer in list(chunk.named_modules()):
            if all(parameter is None for parameter in layer._parameters.values()):
                continue
            delays = delays_weight_grad(layer)
            store.own(layer, number, delays)
            if not _is_converted(layer):  # a layer may be in several chunks
                split = _convert(layer, name or type(layer).__name__, store, fusion)
                counts["delayed" if delays else "split" if split else "whole"] += 1
    for chunk in chunks:
        object.__setattr__(chunk, _STORE, store)
    store.report = SplitReport(**counts)
    return store


def unsplit_weight_grad(model: nn.Module | Sequence[nn.Module]) -> None:
    """Undo ``split_weight_grad``."""
    for chunk in [model] if isinstance(model, nn.Module) else model:
        for layer in chunk.modules():
            if _is_converted(layer):
                layer.__class__ = layer.__dict__.pop(_MARK).original
            layer.__dict__.pop(_STORE, None)


def store_of(chunks: Sequence[Any]) -> WeightGradStore | None:
    """The store of a rank's chunks (wrapped or not), None where they are not converted.

    Raises WeightGradSplitError where only some are, or where they were converted one by one.
    """
    stores: list[WeightGradStore | None] = [wrapped_attribute(chunk, _STORE) for chunk in chunks]
    if any(store is not stores[0] for store in stores):
        raise WeightGradSplitError(
            "the model chunks of this rank do not share one store: call split_weight_grad once, with all of them"
        )
    return stores[0] if stores else None


def check_wrappers(store: WeightGradStore, chunks: Sequence[Any]) -> None:
    """Raises WeightGradSplitError for layers with delay_wgrad_compute in torch's DistributedDataParallel: its hooks
    fire before such a layer has its gradient.
    """
    if store.report.delayed and any(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        raise WeightGradSplitError(
            f"{store.report.delayed} layers with delay_wgrad_compute are inside DistributedDataParallel, which would "
            "reduce their gradients before they are computed; build them without it, or use Megatron-core's wrapper"
        )


def _check(chunk: nn.Module) -> None:
    for name, layer in chunk.named_modules():
        where = name or type(chunk).__name__
        if _is_converted(layer):
            raise WeightGradSplitError(f"{where} was converted before: split_weight_grad is called once per model")
        if isinstance(layer, torch.jit.ScriptModule):
            raise WeightGradSplitError(f"{where} is TorchScript, whose layers cannot be converted")


# -- the derived classes -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SplitState:
    """What a converted layer carries, under the attribute ``_MARK``."""

    store: WeightGradStore
    name: str
    original: Any  # the class before the conversion
    fusion: bool
    kernels: Any

    @property
    def active(self) -> bool:
        """Whether this forward is part of a pipeline step with a backward."""
        return self.store.armed and torch.is_grad_enabled()

    def layer(self, weight: Tensor, bias: Tensor | None, fusion: bool = False) -> SplitLayer:
        """With the parameters of one call."""
        return SplitLayer(self.store, self.name, weight, bias, fusion, self.kernels)


class _LeafAttribute:
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
        store = _state_of(layer).store
        leaf = store.leaf_of(parameter) if store.armed else None
        return parameter if leaf is None else leaf


def _state_of(layer: Any) -> _SplitState:
    return layer.__dict__[_MARK]


def _is_converted(layer: nn.Module) -> bool:
    return _MARK in layer.__dict__


def _convert(layer: nn.Module, name: str, store: WeightGradStore, fusion: bool) -> bool:
    """Give ``layer`` the derived class. Returns whether its weight gradients are deferred."""
    original: Any = type(layer)
    overrides = _overrides_of(layer)
    layer.__dict__[_MARK] = _SplitState(store, name, original, fusion, fused_kernels() if fusion else None)
    names = tuple(name for name in layer._parameters if name not in delayed_names(layer))
    layer.__class__ = _derived(original, overrides, names)
    return bool(overrides)


@cache
def _derived(original: Any, overrides: Overrides, names: tuple[str, ...]) -> Any:
    """One base only: Python lets an object change to a class of the same layout, and more bases may change that."""
    attributes: dict[str, Any] = {name: _LeafAttribute(name) for name in names}
    attributes |= {"__module__": original.__module__, "__reduce_ex__": _reduce_as_original, **dict(overrides)}
    return type(original)(original.__name__, (original,), attributes)


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


def _reduce_as_original(layer: nn.Module, protocol: Any) -> Any:
    state = {name: value for name, value in layer.__dict__.items() if name != _MARK}
    return _bare, (_state_of(layer).original,), state


def _bare(original: Any) -> nn.Module:
    """An empty layer, as unpickling starts from."""
    return original.__new__(original)


def _linear_forward(layer: nn.Linear, input: Tensor) -> Tensor:  # named as torch names it
    state, weight, bias = _state_of(layer), layer._parameters.get("weight"), layer._parameters.get("bias")
    if state.active and weight is not None and input.dim() > 1:
        trained = bias if bias is not None and bias.requires_grad else None
        weight_leaf, bias_leaf = state.store.leaf_of(weight), bias if trained is None else state.store.leaf_of(bias)
        now = state.layer(weight, trained, state.fusion)
        if _splits(now, input, None if bias is not None and bias_leaf is None else weight_leaf):
            return split_linear(input, now, cast(Tensor, weight_leaf), bias_leaf)
    return state.original.forward(layer, input)


def _embedding_forward(layer: nn.Embedding, input: Tensor) -> Tensor:
    state, weight = _state_of(layer), layer._parameters.get("weight")
    if state.active and weight is not None:
        leaf, now = state.store.leaf_of(weight), state.layer(weight, None)
        if _splits(now, input, leaf):
            options = layer.padding_idx, layer.scale_grad_by_freq
            return SplitEmbedding.apply(input, state.store.anchor, leaf, now, *options)
    return state.original.forward(layer, input)


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


def _tensor_parallel_impl(layer: nn.Module, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In place of the method in which both of Megatron's layers multiply."""
    state = _state_of(layer)
    parameter = parameter_behind(weight)
    # With a buffer for output gradients Megatron defers the weight gradient itself. A weight that is no leaf belongs to
    # a layer that is not converted: it stays in autograd's graph.
    own = args or kwargs.get("grad_output_buffer") is not None
    if own or not state.active or parameter is weight:
        return state.original._forward_impl(layer, input, weight, *args, **kwargs)
    bias = kwargs.get("bias")
    trained = None if bias is None or not bias.requires_grad else parameter_behind(bias)
    now = state.layer(parameter, trained, bool(kwargs.get("gradient_accumulation_fusion")))
    call = (kwargs.get(name) for name in ("allreduce_dgrad", "sequence_parallel", "tp_group"))
    return SplitTensorParallelLinear.apply(input, state.store.anchor, weight, bias, now, *call)

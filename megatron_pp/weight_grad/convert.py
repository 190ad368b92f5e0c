"""``split_weight_grad``: converts a rank's model chunks once, before the first step.

A converted layer gets a derived class of the same name. During a step its parameters read as leaves
(``parameter_leaf.py``), and its forward splits the backward (``split_forward.py``). State dicts do not change. Copies
and pickles of a converted layer have the original class.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.common.module_attributes import wrapped_attribute
from megatron_pp.errors import WeightGradSplitError
from megatron_pp.weight_grad.linear import fused_kernels
from megatron_pp.weight_grad.report import Fate, report_of, warn_of_whole_layers, weight_work
from megatron_pp.weight_grad.split_forward import MARK, Overrides, SplitState, overrides_of, state_of
from megatron_pp.weight_grad.store import OwnedLayer, WeightGradStore
from megatron_pp.weight_grad.transformer_engine import (
    SwitchedQueue,
    delayed_names,
    delays_weight_grad,
    from_the_library,
    why_not_switched,
)

_STORE = "_weight_grad_store"
_NOT_ASKED = "it was built without delay_wgrad_compute, and delay_transformer_engine is off"


def split_weight_grad(
    model: nn.Module | Sequence[nn.Module],
    gradient_accumulation_fusion: bool | None = None,
    delay_transformer_engine: bool = True,
) -> WeightGradStore:
    """Convert a model chunk, or the list of a rank's chunks, so that backward can be split. Returns their store.

    torch's ``Linear`` and ``Embedding``, Megatron-core's tensor-parallel linear layers and grouped experts, and
    Transformer Engine's layers defer their weight gradients. Every other layer computes all gradients at once. A
    warning names those that have a weight matrix, with their share of the weight gradients' FLOPs
    (``store.report.whole_layers``). Parameters, state dicts, hooks and wrappers (DistributedDataParallel before or
    after) do not change.

    ``gradient_accumulation_fusion``: one kernel (apex's if it can be imported) adds weight gradients into
    ``main_grad``. The default is the field of the model's ``config``.

    ``delay_transformer_engine``: Transformer Engine's layers queue their weight gradients in pipeline steps even if
    they were built without ``delay_wgrad_compute``, which Megatron-core permits only with
    ``overlap_moe_expert_parallel_comm``. If off, such layers compute all gradients at once.

    Raises WeightGradSplitError for a model that is converted already, or that contains TorchScript."""
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    store = WeightGradStore()
    fates: list[Fate] = []
    for chunk in chunks:
        _check(chunk)
    for number, chunk in enumerate(chunks):
        fusion = gradient_accumulation_fusion
        if fusion is None:
            fusion = bool(getattr(wrapped_attribute(chunk, "config"), "gradient_accumulation_fusion", False))
        for name, layer in list(chunk.named_modules()):
            if all(parameter is None for parameter in layer._parameters.values()):
                continue
            if not _is_converted(layer):  # a layer may be in several chunks
                fates.append(_convert(layer, name or type(layer).__name__, store, fusion, delay_transformer_engine))
            switched = state_of(layer).switched
            delays = switched is not None or delays_weight_grad(layer)
            store.layers.append(OwnedLayer(layer, number, delays, switched))
    for chunk in chunks:
        object.__setattr__(chunk, _STORE, store)
    store.report, store.shares = report_of(fates)
    warn_of_whole_layers(store.report)
    return store


def unsplit_weight_grad(model: nn.Module | Sequence[nn.Module]) -> None:
    """Undo ``split_weight_grad``."""
    for chunk in [model] if isinstance(model, nn.Module) else model:
        for layer in chunk.modules():
            if _is_converted(layer):
                state: SplitState = layer.__dict__.pop(MARK)
                layer.__class__ = state.original
                if state.switched is not None:
                    state.switched.remove()
            layer.__dict__.pop(_STORE, None)


def store_of(chunks: Sequence[Any]) -> WeightGradStore | None:
    """The store of a rank's chunks (wrapped or not), None if they are not converted. Raises WeightGradSplitError if
    only some are converted, or if they were converted one by one."""
    stores: list[WeightGradStore | None] = [wrapped_attribute(chunk, _STORE) for chunk in chunks]
    if any(store is not stores[0] for store in stores):
        raise WeightGradSplitError(
            "the model chunks of this rank do not share one store: call split_weight_grad once, with all of them"
        )
    return stores[0] if stores else None


def check_wrappers(store: WeightGradStore, chunks: Sequence[Any]) -> None:
    """Raises WeightGradSplitError for wrappers that shard parameters, and for layers built with delay_wgrad_compute in
    torch's DistributedDataParallel, whose hooks fire before such a layer has its gradient."""
    if not store.wrappers_known:
        check_sharding(chunks)
        store.wrappers_known = True
    built = store.report.delayed - store.report.switched
    if built and any(isinstance(chunk, DistributedDataParallel) for chunk in chunks):
        raise WeightGradSplitError(
            f"{built} layers with delay_wgrad_compute are inside DistributedDataParallel, which would "
            "reduce their gradients before they are computed; build them without it, or use Megatron-core's wrapper"
        )


# A method of the modules that gather their parameters for a forward and shard them afterwards -> who adds it.
_SHARDING = {"set_requires_gradient_sync": "fully_shard", "_replace_param_with_raw_if_needed": "Megatron-FSDP"}


def check_sharding(chunks: Sequence[Any]) -> None:
    """Raises WeightGradSplitError for wrappers that shard parameters. Under them a layer would keep tensors for W of a
    parameter that has left the model."""
    modules = (module for chunk in chunks if isinstance(chunk, nn.Module) for module in chunk.modules())
    for kind in dict.fromkeys(map(type, modules)):
        for method, what in _SHARDING.items():
            if hasattr(kind, method):
                raise WeightGradSplitError(
                    f"{what} shards the parameters of {kind.__name__} and exchanges them during a step, so that "
                    "gradients that wait for a W would be lost; leave split_weight_grad out (install("
                    "split_weight_grad=False) under Megatron), and the same schedule runs whole backwards, or use "
                    "DistributedDataParallel"
                )


def _check(chunk: nn.Module) -> None:
    for name, layer in chunk.named_modules():
        where = name or type(chunk).__name__
        if _is_converted(layer):
            raise WeightGradSplitError(f"{where} was converted before: split_weight_grad is called once per model")
        if isinstance(layer, torch.jit.ScriptModule):
            raise WeightGradSplitError(f"{where} is TorchScript, whose layers cannot be converted")


# -- the derived classes -----------------------------------------------------------------------------------------------


class _LeafAttribute:
    """A class attribute in place of a parameter. It gives the parameter, or in a pipeline step its leaf."""

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
        leaf = store.leaf_of(parameter) if store.armed and not store.delivering else None
        return parameter if leaf is None else leaf


def _is_converted(layer: nn.Module) -> bool:
    return MARK in layer.__dict__


def _convert(layer: nn.Module, name: str, store: WeightGradStore, fusion: bool, switch: bool) -> Fate:
    """Give ``layer`` the derived class, and a layer of Transformer Engine its queue."""
    original: Any = type(layer)
    overrides, reason = overrides_of(layer)
    what = "split" if overrides else "whole"
    names = tuple(name for name in layer._parameters if name not in delayed_names(layer))
    state = SplitState(store, name, original, fusion, fused_kernels() if fusion else None)
    if delays_weight_grad(layer):
        what = "delayed"
    elif from_the_library(layer):
        reason = why_not_switched(layer) if switch else _NOT_ASKED
        if not reason:
            state.switched = SwitchedQueue(layer)
            what = "switched"
    layer.__dict__[MARK] = state
    layer.__class__ = _derived(original, overrides, names)
    return Fate(name, original.__name__, weight_work(layer, name), what, reason)


@cache
def _derived(original: Any, overrides: Overrides, names: tuple[str, ...]) -> Any:
    """The derived class. It has one base only: Python lets an object change only to a class of the same layout, and
    more bases may change the layout."""
    attributes: dict[str, Any] = {name: _LeafAttribute(name) for name in names}
    attributes |= {"__module__": original.__module__, "__reduce_ex__": _reduce_as_original, **dict(overrides)}
    return type(original)(original.__name__, (original,), attributes)


def _reduce_as_original(layer: nn.Module, protocol: Any) -> Any:
    state = {name: value for name, value in layer.__dict__.items() if name != MARK}
    switched = state_of(layer).switched
    if switched is not None:
        state["wgrad_store"] = switched.built
    return _bare, (state_of(layer).original,), state


def _bare(original: Any) -> nn.Module:
    """An empty layer, from which unpickling starts."""
    return original.__new__(original)

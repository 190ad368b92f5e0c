"""``split_weight_grad``: convert a rank's model chunks, once, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.errors import WeightGradSplitError
from megatron_pp.module_attributes import wrapped_attribute
from megatron_pp.weight_grad.fused import fused_kernels
from megatron_pp.weight_grad.layers import SplitState, convert, is_converted, restore
from megatron_pp.weight_grad.store import SplitReport, WeightGradStore
from megatron_pp.weight_grad.transformer_engine import DelayedLayer, delays_weight_grad

_STORE = "_weight_grad_store"


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
        fusion = _fusion(chunk) if gradient_accumulation_fusion is None else gradient_accumulation_fusion
        for name, layer in _layers_with_parameters(chunk):
            store.own(layer, number)
            if not is_converted(layer):  # a layer may be in several chunks
                counts[_convert_layer(layer, name, number, store, fusion)] += 1
    for chunk in chunks:
        object.__setattr__(chunk, _STORE, store)
    store.report = SplitReport(**counts)
    return store


def unsplit_weight_grad(model: nn.Module | Sequence[nn.Module]) -> None:
    """Undo ``split_weight_grad``."""
    for chunk in [model] if isinstance(model, nn.Module) else model:
        for layer in chunk.modules():
            if is_converted(layer):
                restore(layer)
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


def _convert_layer(layer: nn.Module, name: str, chunk: int, store: WeightGradStore, fusion: bool) -> str:
    if delays_weight_grad(layer):
        store.own_external(DelayedLayer(layer, chunk))
        return "delayed"
    state = SplitState(store, name, type(layer), fusion, fused_kernels() if fusion else None)
    return "split" if convert(layer, state) else "whole"


def _layers_with_parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    layers = ((name or type(layer).__name__, layer) for name, layer in list(chunk.named_modules()))
    return ((name, layer) for name, layer in layers if any(p is not None for p in layer._parameters.values()))


def _check(chunk: nn.Module) -> None:
    for name, layer in chunk.named_modules():
        where = name or type(chunk).__name__
        if is_converted(layer):
            raise WeightGradSplitError(f"{where} was converted before: split_weight_grad is called once per model")
        if isinstance(layer, torch.jit.ScriptModule):
            raise WeightGradSplitError(f"{where} is TorchScript, whose layers cannot be converted")


def _fusion(chunk: nn.Module) -> bool:
    return bool(getattr(wrapped_attribute(chunk, "config"), "gradient_accumulation_fusion", False))

"""What a converted layer is: its own class with one more in front, which shows taps for parameters and splits what it
can.

The class in front is made per class of layer. It adds nothing to the state dict, and copies and pickles of a converted
layer are layers of the class it had before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_pp.weight_grad.linear import EmbeddingParameters, LinearParameters, split_embedding, split_linear
from megatron_pp.weight_grad.megatron_linear import TensorParallelCall, split_tensor_parallel_linear
from megatron_pp.weight_grad.store import WeightGradStore
from megatron_pp.weight_grad.tap import parameter_behind, tapped

MARK = "_weight_grad_split"
_MEGATRON_LAYERS = "megatron.core.tensor_parallel.layers"


class SplitState(NamedTuple):
    """What a converted layer carries, under the attribute ``MARK``."""

    store: WeightGradStore
    original: type[nn.Module]
    fusion: bool
    kernels: Any

    @property
    def active(self) -> bool:
        """Whether a forward now belongs to a pipeline step that will run backward."""
        return self.store.armed and torch.is_grad_enabled()


class TappedParameter:
    """Class attribute in the place of a parameter: the parameter, or in a pipeline step a tap of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        if layer is None:
            return self
        parameters = layer.__dict__["_parameters"]
        if self.name not in parameters:
            raise AttributeError(f"{type(layer).__name__!r} object has no attribute {self.name!r}")
        parameter = parameters[self.name]
        state: SplitState = layer.__dict__[MARK]
        if parameter is None or not parameter.requires_grad or not state.active:
            return parameter
        return tapped(parameter, state.store)


class Converted:
    """In front of every converted layer's class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name != MARK}
        return _bare, (self.__dict__[MARK].original,), state


class ConvertedLinear(Converted):
    """In front of torch's ``Linear``."""

    def forward(self, input: Tensor) -> Tensor:  # named as torch names it
        state: SplitState = self.__dict__[MARK]
        parameters = self.__dict__["_parameters"]
        weight, bias = parameters["weight"], parameters["bias"]
        if not state.active or input.dim() < 2 or not _any_trainable(weight, bias):
            return super().forward(input)  # type: ignore[misc]
        return split_linear(input, LinearParameters(state.store, weight, bias, state.fusion, state.kernels))


class ConvertedEmbedding(Converted):
    """In front of torch's ``Embedding``."""

    def forward(self, input: Tensor) -> Tensor:
        state: SplitState = self.__dict__[MARK]
        weight = self.__dict__["_parameters"]["weight"]
        if not state.active or not weight.requires_grad:
            return super().forward(input)  # type: ignore[misc]
        layer: Any = self
        parameters = EmbeddingParameters(state.store, weight, layer.padding_idx, layer.scale_grad_by_freq)
        return split_embedding(input, parameters)


class ConvertedTensorParallelLinear(Converted):
    """In front of Megatron-core's ``ColumnParallelLinear`` and ``RowParallelLinear``, at the point where both
    multiply.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state: SplitState = self.__dict__[MARK]
        parameter = parameter_behind(weight)
        call = TensorParallelCall.of(kwargs) if not args else None
        # A weight that is no tap belongs to a layer that was not converted: it stays in autograd's graph.
        if call is None or not state.active or parameter is weight:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        bias = kwargs.get("bias")
        layer = LinearParameters(
            state.store,
            parameter,
            None if bias is None else parameter_behind(bias),
            call.gradient_accumulation_fusion,
            state.kernels,
        )
        return split_tensor_parallel_linear(input, layer, call)


def converted_base(layer: nn.Module) -> type[Converted]:
    """What goes in front of ``layer``'s class. Classes that bring a forward of their own are tapped only."""
    kind = type(layer)
    if isinstance(layer, nn.Linear) and kind.forward is nn.Linear.forward and _has_plain_parameters(layer):
        return ConvertedLinear
    if isinstance(layer, nn.Embedding) and kind.forward is nn.Embedding.forward and _has_plain_parameters(layer):
        # Sparse gradients and renormalised rows are autograd's business.
        return Converted if layer.sparse or layer.max_norm is not None else ConvertedEmbedding
    if any(base.__module__ == _MEGATRON_LAYERS and hasattr(base, "_forward_impl") for base in kind.__mro__):
        return ConvertedTensorParallelLinear
    return Converted


def convert(layer: nn.Module, state: SplitState) -> None:
    """Put the class in front of ``layer``'s own."""
    names = tuple(layer._parameters)
    layer.__dict__[MARK] = state
    layer.__class__ = _converted_class(type(layer), converted_base(layer), names)  # type: ignore[arg-type]


def restore(layer: nn.Module) -> None:
    """Give a converted layer its own class back."""
    state: SplitState = layer.__dict__.pop(MARK)
    layer.__class__ = state.original


@cache
def _converted_class(kind: type[nn.Module], front: type[Converted], names: tuple[str, ...]) -> type[nn.Module]:
    attributes: dict[str, Any] = {name: TappedParameter(name) for name in names}
    attributes["__module__"] = kind.__module__
    return type(kind.__name__, (front, kind), attributes)


def _bare(kind: type[nn.Module]) -> nn.Module:
    """A layer of ``kind`` without anything in it, as unpickling starts from."""
    return kind.__new__(kind)


def _has_plain_parameters(layer: nn.Module) -> bool:
    """Not a layer whose weight is computed from others (torch.nn.utils.parametrize)."""
    return "weight" in layer._parameters


def _any_trainable(*parameters: Tensor | None) -> bool:
    return any(p is not None and p.requires_grad for p in parameters)

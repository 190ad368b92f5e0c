"""Weight gradients that wait for their W."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(slots=True)
class SplitLayer:
    """A layer with a deferred weight gradient. ``store`` is its ``WeightGradStore``."""

    store: Any
    name: str
    weight: Tensor

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The parameters with a deferred gradient."""
        return (self.weight,)


@dataclass(slots=True)
class Deferred:
    """The gradients of one call of ``layer``: keeps the call's input and the gradient of its output, nothing else."""

    layer: SplitLayer
    layer_input: Tensor
    grad_output: Tensor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.layer.trained

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.layer_input, self.grad_output

    @property
    def name(self) -> str:
        return self.layer.name

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(parameter, gradient) for each; None where the gradient went into ``main_grad`` directly. Gradients are fresh
        tensors.
        """
        raise NotImplementedError


class Ready(NamedTuple):
    """A gradient that B has computed; it waits so that hooks fire with the last one."""

    parameters: tuple[Tensor]
    kept: tuple[Tensor]
    name: str = "of a gradient that B computed"

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        return zip(self.parameters, self.kept, strict=True)


class Waiting(NamedTuple):
    """``deferred``, queued by autograd's run ``task`` when the version counters of its tensors added up to
    ``versions``. Autograd drops the gradients of parameters that are ``frozen`` by then.
    """

    task: int
    deferred: Deferred | Ready
    versions: int
    frozen: tuple[int, ...] = ()


def versions(deferred: Deferred | Ready) -> int:
    """Grows with every in-place change of what ``deferred`` keeps."""
    total = 0
    for tensor in deferred.kept:
        total += tensor._version
    return total

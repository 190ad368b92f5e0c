"""Weight gradients that are queued until W runs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(slots=True)
class SplitLayer:
    """A converted layer with the parameters of one call."""

    store: Any  # the layer's WeightGradStore
    name: str
    weight: Tensor
    bias: Tensor | None  # None if there is none, or if it is not trained
    fusion: bool  # add weight gradients into ``main_grad`` by one kernel (Megatron's gradient_accumulation_fusion)
    kernels: Any  # apex's kernels, or None


@dataclass(slots=True)
class Deferred:
    """The weight gradients of one call of ``layer``. Keeps only the call's input and the gradient of its output."""

    layer: SplitLayer
    layer_input: Tensor
    grad_output: Tensor

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        weight = self.layer.weight
        bias = self.layer.bias
        return (weight,) if bias is None else (weight, bias)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.layer_input, self.grad_output

    @property
    def name(self) -> str:
        return self.layer.name

    def prepare(self) -> None:
        """Start communication that ``compute`` waits for. Called at most once; all ranks call it, or none does."""

    def compute(self, fused: bool = True) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(parameter, gradient) of each parameter, in new tensors. With ``fused``, the gradient is None if it was added
        to ``main_grad``."""
        raise NotImplementedError

    def is_put_off(self) -> bool:
        """Whether the weight gradient waits in the store. Called in the layer's backward."""
        current = self.layer.store.running()
        return current is not None and current.puts_off(self.layer.weight)

    def leave_or_compute(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias that the layer's backward returns; None if the store queues them."""
        store = self.layer.store
        if self.is_put_off():
            store.leave(self)
            return None, None
        grads = [grad for _, grad in self.compute(fused=store.running() is not None)]
        return grads[0], grads[1] if len(grads) == 2 else None


class Ready(NamedTuple):
    """A gradient that B has computed. It is queued so that hooks fire with the last gradient."""

    parameters: tuple[Tensor]
    kept: tuple[Tensor]
    name: str = "of a gradient that B computed"

    def prepare(self) -> None:
        """Does nothing: the gradient exists already."""

    def compute(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        return zip(self.parameters, self.kept, strict=True)


class Waiting(NamedTuple):
    """An entry of the queue. Autograd's run ``task`` queued ``deferred``. ``versions`` is the sum of the version
    counters of its tensors at that time, and ``frozen`` has the ids of parameters that were frozen: their gradients are
    dropped."""

    task: int
    deferred: Any  # a Deferred, a Ready or a DelayedRun
    versions: int
    frozen: tuple[int, ...] = ()


def versions(deferred: Any) -> int:
    """A number that grows with every in-place change of the tensors that ``deferred`` keeps."""
    total = 0
    for tensor in deferred.kept:
        total += tensor._version
    return total


def frozen(parameters: Iterable[Tensor]) -> tuple[int, ...]:
    """The ids of ``parameters`` that are frozen."""
    return tuple([id(parameter) for parameter in parameters if not parameter.requires_grad])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)

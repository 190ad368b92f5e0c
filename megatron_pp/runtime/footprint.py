"""The memory that a stage keeps of one microbatch: until its backward, and after a split backward until its W.

``forward`` and ``weight`` are what ``megatron_pp.plan.measured.Measured`` calls ``activation`` and
``weight_activation``, and their ratio is the weight share of ``megatron_pp.plan.activations``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pp.weight_grad.store import WeightGradStore


@dataclass(frozen=True)
class Footprint:
    """Bytes that one microbatch of a stage keeps, its input and output included and parameters and their gradients not.

    forward  between its forward and the release of its output
    weight   between its input-gradient backward and its W
    sent     between the release of its output and its backward: less than ``forward`` by the output, unless the
             stage's own graph has saved that
    """

    forward: int
    weight: int
    sent: int

    @property
    def share(self) -> float:
        """``weight`` over ``forward``; 0 for a stage that keeps nothing."""
        return self.weight / self.forward if self.forward else 0.0


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operations have allocated while it was active and that are still alive. Workspace of
    kernels is not recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[StorageWeakRef, int] = {}
        self._foreign: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in _tensors(args):
            storage = StorageWeakRef(value.untyped_storage())
            if storage not in self._seen:
                self._foreign.add(storage)
        result = func(*args, **(kwargs or {}))
        for value in _tensors(result if isinstance(result, (tuple, list)) else (result,)):
            if StorageWeakRef(value.untyped_storage()) not in self._foreign:
                self.see(value)
        return result

    def see(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` in any case."""
        storage = tensor.untyped_storage()
        self._seen.setdefault(StorageWeakRef(storage), storage.nbytes())

    def bytes_besides(self, others: Iterable[Tensor]) -> int:
        """Bytes of the storages that are alive, without those of ``others``."""
        left_out = {tensor.untyped_storage()._cdata for tensor in others}
        alive = {ref.cdata: size for ref, size in self._seen.items() if not ref.expired()}
        return sum(size for cdata, size in alive.items() if cdata not in left_out)


def measure_footprint(
    store: WeightGradStore, chunks: Sequence[nn.Module], chunk: int, forward: Callable[[], tuple[Any, Tensor]]
) -> Footprint:
    """Run one microbatch of ``chunks[chunk]``: forward, release of the output, input-gradient backward and W. Measure
    the memory after each but the last.

    ``store`` is what ``split_weight_grad(chunks)`` returned. ``forward()`` runs the chunk and returns (its input, its
    output); the output's gradient is zero, so the parameters' gradients stay what they were (zero where they were
    None) and no accumulation hook fires. The input counts where something keeps it alive.
    """
    own = list(own_tensors(chunks))
    with LiveStorages() as storages, store.step({}):  # no microbatch is a last one: no hooks fire
        given, output = forward()
        if isinstance(given, Tensor):
            storages.see(given)
        del given
        after_forward = storages.bytes_besides(own)
        grad = torch.zeros_like(output)
        root = get_gradient_edge(output.view_as(output))
        del output
        after_release = storages.bytes_besides([*own, grad])
        with store.backward(chunk, 0, split=True):
            torch.autograd.backward((root,), (grad,))
        del root, grad
        after_backward = storages.bytes_besides([*own, *_gradients(chunks)])
        store.run(chunk, 0)
    return Footprint(after_forward, after_backward, after_release)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """The tensors of a flat or once nested sequence."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (v for v in value if isinstance(v, Tensor))


def own_tensors(chunks: Sequence[nn.Module]) -> Iterable[Tensor]:
    """What is the model's, not a microbatch's."""
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()
    yield from _gradients(chunks)


def _gradients(chunks: Sequence[nn.Module]) -> Iterable[Tensor]:
    found = (getattr(p, name, None) for chunk in chunks for p in chunk.parameters() for name in ("grad", "main_grad"))
    return (gradient for gradient in found if gradient is not None)

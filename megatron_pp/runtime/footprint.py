"""The memory that a stage keeps for one microbatch: until its backward, and after a split backward until its W.

``measure_footprint`` runs one microbatch by itself; ``KeptBytes`` counts within a real step.
``forward`` and ``weight`` are what ``megatron_pp.plan.costs.measured.Measured`` calls ``activation`` and
``weight_activation``, and their ratio is the weight share of ``megatron_pp.plan.costs.activations``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_pp.plan.ir.instruction import BACKWARD_OPS, FORWARD, FREE_F, INPUT_GRAD, Instruction
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.weight_grad.deferred import tensors_in
from megatron_pp.weight_grad.store import WeightGradStore

if TYPE_CHECKING:
    from megatron_pp.runtime.engine.executor import PlanExecutor


@dataclass(frozen=True)
class Footprint:
    """Bytes that one microbatch of a stage keeps, with its input and output, without parameters and their gradients.

    forward  between its forward and the release of its output
    weight   between its input-gradient backward and its W
    sent     between the release of its output and its backward: less than ``forward`` by the output, unless the
             stage's own graph has saved that"""

    forward: int
    weight: int
    sent: int

    @property
    def share(self) -> float:
        """``weight`` over ``forward``; 0 for a stage that keeps nothing."""
        return self.weight / self.forward if self.forward else 0.0


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operations allocated while it was active and that are still alive. It does not see the
    workspace of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[StorageWeakRef, int] = {}
        self._foreign: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in tensors_in(args):
            storage = StorageWeakRef(value.untyped_storage())
            if storage not in self._seen:
                self._foreign.add(storage)
        result = func(*args, **(kwargs or {}))
        for value in tensors_in(result):
            if StorageWeakRef(value.untyped_storage()) not in self._foreign:
                self.see(value)
        return result

    def see(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` in any case."""
        storage = tensor.untyped_storage()
        self._seen.setdefault(StorageWeakRef(storage), storage.nbytes())

    def bytes_without(self, others: Iterable[Tensor]) -> int:
        """Bytes of the storages that are alive, without those of ``others``."""
        left_out = {tensor.untyped_storage()._cdata for tensor in others}
        alive = {ref.cdata: size for ref, size in self._seen.items() if not ref.expired()}
        return sum(size for cdata, size in alive.items() if cdata not in left_out)


def measure_footprint(
    store: WeightGradStore, chunks: Sequence[nn.Module], chunk: int, forward: Callable[[], tuple[Any, Tensor]]
) -> Footprint:
    """Run one microbatch of ``chunks[chunk]``: forward, release of the output, input-gradient backward and W. Memory is
    measured after each of the first three.

    ``store`` is what ``split_weight_grad(chunks)`` returned. ``forward()`` runs the chunk and returns (its input, its
    output); the output's gradient is zero, so the parameters' gradients stay what they were (zero where they were
    None) and no accumulation hook fires. The input counts if something keeps it alive."""
    own = list(own_tensors(chunks))
    with LiveStorages() as storages, store.step({}):  # no microbatch is a last one: no hooks fire
        given, output = forward()
        if isinstance(given, Tensor):
            storages.see(given)
        del given
        after_forward = storages.bytes_without(own)
        grad = torch.zeros_like(output)
        root = get_gradient_edge(output.view_as(output))
        del output
        after_release = storages.bytes_without([*own, grad])
        with store.backward(chunk, 0, split=True):
            torch.autograd.backward((root,), (grad,))
        del root, grad
        after_backward = storages.bytes_without([*own, *_gradients(chunks)])
        store.run(chunk, 0)
    return Footprint(after_forward, after_backward, after_release)


def own_tensors(chunks: Sequence[nn.Module]) -> Iterable[Tensor]:
    """Tensors of the model, not of a microbatch."""
    for chunk in chunks:
        yield from chunk.parameters()
        yield from nn.Module.buffers(chunk)  # ``chunk.buffers`` is a list in Megatron's DistributedDataParallel
    yield from _gradients(chunks)


def _gradients(chunks: Sequence[nn.Module]) -> Iterable[Tensor]:
    found = (getattr(p, name, None) for chunk in chunks for p in chunk.parameters() for name in ("grad", "main_grad"))
    return (gradient for gradient in found if gradient is not None)


Forward = tuple[int, int]  # (stage, microbatch)


class KeptBytes:
    """An observer of one step of ``plan`` on ``rank``. ``saved_tensors_hooks`` around two forwards see what their
    graphs save, and return it unchanged, so no number changes. Storages that both forwards save belong to the model and
    are not counted. Not seen are tensors that an operation keeps outside of autograd (as an attribute of its context),
    and tensors that the model's own hooks have replaced, for example by copies elsewhere.

    After the step, for each stage, without stages that offload all forwards:

    forward   bytes kept from a forward to its backward: what it saved, its input, and its output where the engine keeps
              the data; parameters, buffers and gradients not
    weight    bytes kept from an input-gradient backward to its W
    received  bytes of the stage's input

    ``engine`` is set before the step, and left alone after it. Chunks and their store are referred to weakly: a step
    that fails leaves this object behind, and a model must not live for as long."""

    def __init__(self, plan: Plan, rank: int, chunks: Sequence[Any], weights: WeightGradStore | None) -> None:
        self.engine: PlanExecutor | None = None
        self.forward: dict[int, int] = {}
        self.weight: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self._weights = None if weights is None else weakref.ref(weights)
        self._chunks = [weakref.ref(chunk) for chunk in chunks]
        self._first, self._counted = _two_microbatches(plan, rank)
        self._saved: defaultdict[Forward, dict[StorageWeakRef, int]] = defaultdict(dict)
        self._hooks: saved_tensors_hooks | None = None

    def hooked(self, at: Instruction) -> bool:
        """Whether the forward of this operation's microbatch runs within hooks."""
        return at.mb in (self._first.get(at.stage), self._counted.get(at.stage))

    def begin(self, at: Instruction) -> None:
        if at.op == FORWARD and self.hooked(at):
            saved = self._saved[at.stage, at.mb]
            self._hooks = saved_tensors_hooks(lambda tensor: _noted(saved, tensor), lambda tensor: tensor)
            self._hooks.__enter__()
        elif at.op in BACKWARD_OPS and at.mb == self._counted.get(at.stage) and at.stage not in self.forward:
            self._count(at)

    def end(self, at: Instruction) -> None:
        if at.op == FORWARD and self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__()
        elif at.op == INPUT_GRAD and at.mb == self._counted.get(at.stage) and self._weights is not None:
            weights = self._weights()
            assert weights is not None  # the step has it
            waiting = weights.kept_tensors(at.chunk, at.mb if at.part < 0 else (at.mb, at.part))
            kept = self._alive(at) | _storages(waiting)
            self.weight[at.stage] = self.weight.get(at.stage, 0) + self._bytes(kept)

    def _count(self, at: Instruction) -> None:
        """Called before the first backward of a microbatch, or of its slices."""
        assert self.engine is not None
        outputs = dict(self.engine.outputs)
        sent = {task.key for _, task in self.engine.deferred if task.op == FREE_F}
        for key in sent & outputs.keys():
            del outputs[key]  # the transport still holds the output for a while; it is not the stage's memory
        given, made = (
            [tensor for key, value in table.items() if key[:2] == (at.stage, at.mb) for tensor in tensors_in(value)]
            for table in (self.engine.inputs, outputs)
        )
        self.received[at.stage] = sum(tensor.numel() * tensor.element_size() for tensor in given)
        self.forward[at.stage] = self._bytes(self._alive(at) | _storages([*given, *made]))

    def _alive(self, at: Instruction) -> dict[StorageWeakRef, int]:
        """Storages that this forward has saved and that the other microbatch's forward has not saved."""
        first = self._first[at.stage]
        of_model = self._saved[at.stage, first] if first != at.mb else {}
        saved = self._saved[at.stage, at.mb]
        return {ref: size for ref, size in saved.items() if ref not in of_model and not ref.expired()}

    def _bytes(self, storages: Mapping[StorageWeakRef, int]) -> int:
        chunks = [chunk for chunk in (known() for known in self._chunks) if chunk is not None]
        own = {tensor.untyped_storage()._cdata for tensor in own_tensors(chunks)}
        return sum(size for ref, size in storages.items() if ref.cdata not in own)


def _two_microbatches(plan: Plan, rank: int) -> tuple[dict[int, int], dict[int, int]]:
    """For each stage, the first microbatch, and the one that is counted: the second, if there is one. Microbatches that
    are offloaded have hooks of their own and are left out. Those in pairs are taken only if there are no others."""
    offloaded = {(stage, mb) for stage, mb, _ in plan.copied(rank)}
    alone: defaultdict[int, list[int]] = defaultdict(list)
    paired: defaultdict[int, list[int]] = defaultdict(list)
    for entry in plan.programs[rank]:
        for at in entry.members or (entry,):
            if at.op == FORWARD and (at.stage, at.mb) not in offloaded:
                of_stage = (paired if entry.members else alone)[at.stage]
                of_stage += [at.mb] if at.mb not in of_stage else []
    chosen = {stage: mbs[:2] for stage, mbs in (paired | alone).items()}
    return {stage: mbs[0] for stage, mbs in chosen.items()}, {stage: mbs[-1] for stage, mbs in chosen.items()}


def _noted(saved: dict[StorageWeakRef, int], tensor: Tensor) -> Tensor:
    saved.update(_storages([tensor]))
    return tensor


def _storages(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    """Each storage once, with its bytes."""
    return {StorageWeakRef(s): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}

"""Bytes that one microbatch of each stage keeps, counted in a running step, whatever its forward does.

``torch.autograd.graph.saved_tensors_hooks`` around two forwards see what their graphs save, and give it back as it is,
so no number changes. What both have saved is the model's, not a microbatch's. Not seen: what an operation keeps outside
of autograd (an attribute of its context), and what hooks of the model's own around parts of it have seen before, which
they may have moved elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.plan.instruction import BACKWARD_OPS, FORWARD, INPUT_GRAD, Instruction
from megatron_pp.plan.spec import Plan
from megatron_pp.runtime.footprint import own_tensors
from megatron_pp.weight_grad.store import WeightGradStore

Cell = tuple[int, int]  # (stage, microbatch)


class Engine(Protocol):
    """What is read of the engine: tensors by (stage, microbatch, slice)."""

    @property
    def inputs(self) -> Mapping[Any, Any]: ...

    @property
    def outputs(self) -> Mapping[Any, Any]: ...


class KeptBytes:
    """An observer of one step of ``plan`` on ``rank``. By stage, afterwards, without stages that offload all forwards:

    forward   bytes kept from a forward to its backward: what it saved, its input, and its output where the engine keeps
              the data; parameters, buffers and gradients not
    weight    bytes kept from an input-gradient backward to its W
    received  bytes of the stage's input

    ``engine`` is set before the step, and left alone after it.
    """

    def __init__(self, plan: Plan, rank: int, chunks: Sequence[Any], weights: WeightGradStore | None) -> None:
        self.engine: Engine | None = None
        self.forward: dict[int, int] = {}
        self.weight: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self._weights = weights
        self._chunks = chunks
        self._first, self._counted = _two_microbatches(plan, rank)
        self._saved: defaultdict[Cell, dict[StorageWeakRef, int]] = defaultdict(dict)
        self._hooks: saved_tensors_hooks | None = None

    def hooked(self, at: Instruction) -> bool:
        """Whether a forward of this operation's cell runs within hooks."""
        return at.mb in (self._first.get(at.stage), self._counted.get(at.stage))

    def begin(self, at: Instruction) -> None:
        if at.op == FORWARD and self.hooked(at):
            saved = self._saved[at.stage, at.mb]
            self._hooks = saved_tensors_hooks(lambda tensor: _noted(saved, tensor), _itself)
            self._hooks.__enter__()
        elif at.op in BACKWARD_OPS and at.mb == self._counted.get(at.stage) and at.stage not in self.forward:
            self._count(at)

    def end(self, at: Instruction) -> None:
        if at.op == FORWARD and self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__()
        elif at.op == INPUT_GRAD and at.mb == self._counted.get(at.stage) and self._weights is not None:
            waiting = self._weights.kept_tensors(at.chunk, at.mb if at.slice < 0 else (at.mb, at.slice))
            kept = self._alive(at) | _storages(waiting)
            self.weight[at.stage] = self.weight.get(at.stage, 0) + self._bytes(kept)

    def _count(self, at: Instruction) -> None:
        """Before the first backward of a microbatch's slices."""
        assert self.engine is not None
        given, made = (
            [tensor for key, value in table.items() if key[:2] == (at.stage, at.mb) for tensor in _tensors(value)]
            for table in (self.engine.inputs, self.engine.outputs)
        )
        self.received[at.stage] = sum(tensor.numel() * tensor.element_size() for tensor in given)
        self.forward[at.stage] = self._bytes(self._alive(at) | _storages([*given, *made]))

    def _alive(self, at: Instruction) -> dict[StorageWeakRef, int]:
        """Storages that this cell has saved, and another microbatch has not."""
        first = self._first[at.stage]
        of_model = self._saved[at.stage, first] if first != at.mb else {}
        saved = self._saved[at.stage, at.mb]
        return {ref: size for ref, size in saved.items() if ref not in of_model and not ref.expired()}

    def _bytes(self, storages: Mapping[StorageWeakRef, int]) -> int:
        own = {tensor.untyped_storage()._cdata for tensor in own_tensors(self._chunks)}
        return sum(size for ref, size in storages.items() if ref.cdata not in own)


def _two_microbatches(plan: Plan, rank: int) -> tuple[dict[int, int], dict[int, int]]:
    """By stage: the first microbatch, and the one that is counted, the second if there is one. Of those whose forward
    is not offloaded, within hooks of its own; those in pairs only where there are no others.
    """
    offloaded = {(stage, mb) for stage, mb, _ in plan.offloaded(rank)}
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


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _storages(tensors: Iterable[Tensor]) -> dict[StorageWeakRef, int]:
    """Each storage once, with its bytes."""
    return {StorageWeakRef(s): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}


def _tensors(value: Any) -> list[Tensor]:
    """What is data of an activation: outputs that were sent are places in the graph."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, Tensor)]

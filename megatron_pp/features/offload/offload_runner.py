"""Keeps the tensors that a forward saves for its backward in host memory in between (OFFLOAD to WAIT_LOAD).

``torch.autograd.graph.saved_tensors_hooks`` around a forward see each tensor that its graph saves. The graph gets a
reference to a place instead. So the engine may drop the tensor once it was copied, and later put the copy into that
place. A tensor that something else holds too (the user, a pending send, an operation outside of autograd) stays alive
although it was copied.

Not copied are parameters and buffers of the chunks and tensors that share memory with them, tensors under SMALLEST
bytes, tensors that are more than their memory (subclasses, lazy conjugates), tensors on another kind of device, and
keys and values that slices of a sequence share. If several tensors share memory, that memory is copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from megatron_pp.config.settings import LAYER_GRAPHS, StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.offload import host_copies
from megatron_pp.features.offload.host_copies import HostCopies, Wait
from megatron_pp.features.offload.offload_instructions import FREE_OFFLOAD, LOAD, OFFLOAD, WAIT_LOAD
from megatron_pp.features.offload.offload_lowering import offloaded_chunks
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.ir.tasks import Cell, Task
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.engine.compute import each_tensor
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from megatron_pp.runtime.step_hooks import FeatureRun, StepHooks

SMALLEST = 64


class _Block:
    """The bytes of one storage that a forward has saved.

    memory       the bytes on the device, flat, from the storage's first byte on; None while they are only on the host
    host         a copy of the bytes from ``start`` to ``stop``, which are those in use"""

    __slots__ = ("host", "memory", "start", "stop")

    def __init__(self, tensor: Tensor) -> None:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.memory: Tensor | None = flat.set_(tensor.untyped_storage())
        self.host: Tensor | None = None
        self.start, self.stop = flat.numel(), 0

    def cover(self, tensor: Tensor) -> None:
        """Extend the bytes in use by those of ``tensor``, which is in this memory."""
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.start, self.stop = min(self.start, start), max(self.stop, start + (int(last) + 1) * size)

    def copy(self) -> tuple[Tensor, Tensor]:
        assert self.host is not None
        return self.host, self.here[self.start : self.stop]

    @property
    def here(self) -> Tensor:
        assert self.memory is not None, "what was offloaded is used before it is back"
        return self.memory


class _Saved:
    """One saved tensor: the tensor itself or, once it was offloaded, its place in its block."""

    __slots__ = ("block", "changed", "tensor", "version", "view")

    def __init__(self, tensor: Tensor, block: _Block | None) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.view = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
        self.block = block
        self.changed = False

    def leave(self) -> None:
        """Drop the tensor if its block is copied; only the block then holds the memory."""
        if self.block is not None and self.block.host is not None and self.tensor is not None:
            self.changed = self.tensor._version != self.version
            self.tensor = None

    def get(self) -> Tensor:
        tensor = self.tensor
        if self.changed or (tensor is not None and tensor._version != self.version):
            raise RuntimeError(
                f"a tensor of shape {list(self.view[1])} that a forward saved for its backward was changed by an "
                "in-place operation; clone it before"
            )
        if tensor is not None:
            return tensor
        assert self.block is not None
        dtype, size, stride, offset = self.view
        whole = self.block.here
        return whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(dtype).as_strided(size, stride, offset)


class _Step(StepHooks):
    def check_draft(self, draft: PlanSpec, inputs: StepInputs, settings: StepSettings) -> None:
        """Raises ScheduleInputError if the tensors that a forward saves cannot be known, or are not its own."""
        if draft.forward_only or not offloaded_chunks(draft):
            return
        if draft.joins:
            raise ScheduleInputError(
                "pairs of a forward and a backward (overlapped_forward_backward) cannot be offloaded: it is not known "
                "which half saves what; set config.offload_chunks to 0, or leave the pairs out"
            )
        if settings.cuda_graph_impl in LAYER_GRAPHS:
            raise ScheduleInputError(
                f"config.cuda_graph_impl is {settings.cuda_graph_impl!r}, whose graphs keep activations in buffers of "
                "their own; set config.offload_chunks to 0"
            )

    def runner(self, run: FeatureRun) -> Offloads | None:
        keys = run.plan.copied(run.communicator.rank)
        if not keys:
            return None
        kept = run.communicator.kept_for_features
        if "copies" not in kept:
            kept["copies"] = host_copies.host_copies(run.communicator.device)
        shared = next((one.shared for one in run.outer if hasattr(one, "shared")), None)
        return Offloads(kept["copies"], keys, run.chunks, shared)


STEP = _Step()


@dataclass(eq=False)
class _Kept:
    """The tensors that one forward has saved."""

    blocks: dict[int, _Block] = field(default_factory=dict)  # address of a storage -> block; ``saved`` keep it alive
    saved: list[_Saved] = field(default_factory=list)
    wait: Wait = field(init=False)  # for the copy that was posted last


class Offloads:
    """Copies the tensors that forwards of a rank's step save to host memory and back, as the plan says. ``keys``: the
    forwards that are offloaded. ``chunks``: the rank's model chunks. ``shared``: the tensors that slices of a sequence
    share in a task's microbatch. ``kept`` is empty after the step."""

    def __init__(
        self,
        copies: HostCopies,
        keys: frozenset[Cell],
        chunks: Iterable[Any],
        shared: Callable[[Task], Sequence[Tensor]] | None = None,
    ) -> None:
        self.copies = copies
        self.keys = keys
        self.shared = shared
        self.kept: dict[Cell, _Kept] = {}
        self.tables = {"offloaded": self.kept}
        modules = [chunk for chunk in chunks if isinstance(chunk, Module)]
        # Megatron's wrapper has a list under the name of this method.
        own = (tensor for module in modules for tensor in (*module.parameters(), *Module.buffers(module)))
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        """Note what forwards save, and add the handlers that copy it."""
        handlers |= {
            ins.FORWARD: partial(self.forward, handlers[ins.FORWARD]),
            OFFLOAD: self.offload,
            FREE_OFFLOAD: partial(self._free_with_input, engine),
            LOAD: self.load,
            WAIT_LOAD: self.wait_load,
        }
        engine.calls.forward = partial(self._run_forward, engine.calls.forward)

    def _run_forward(self, call: Callable[..., Any], at: Task, given: Any) -> Any:
        return call(at, each_tensor(view_of, given) if at.key in self.keys else given)

    def _free_with_input(self, engine: PlanExecutor, at: Task) -> None:
        """Drop the data of a stage's input: from here on the engine needs only its gradient."""
        self.free(at)
        stand_in(engine.inputs.get(at.key))

    def forward(self, handler: Callable[[Task], None], at: Task) -> None:
        """Run ``handler`` of the forward ``at``, and note what it saves."""
        if at.key not in self.keys:
            handler(at)
            return
        kept = self.kept[at.key] = _Kept()
        with saved_tensors_hooks(lambda tensor: self._pack(kept, tensor), _Saved.get):
            handler(at)

    def _pack(self, kept: _Kept, tensor: Tensor) -> _Saved:
        if not self._is_to_go(tensor):
            return _Saved(tensor, None)
        tensor = tensor.detach()  # of the same version counter
        address = tensor.untyped_storage().data_ptr()
        block = kept.blocks.get(address)
        if block is None:
            block = kept.blocks[address] = _Block(tensor)
        block.cover(tensor)
        saved = _Saved(tensor, block)
        kept.saved.append(saved)
        return saved

    def _is_to_go(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.numel() * tensor.element_size() < SMALLEST:
            return False
        return tensor.untyped_storage().data_ptr() not in self._own

    def offload(self, at: Task) -> None:
        """Post the copy of what the forward has saved, without what slices share."""
        kept = self.kept[at.key]
        shared = () if self.shared is None else self.shared(at)
        device = self.copies.device.type
        elsewhere = (s.tensor for s in kept.saved if s.tensor is not None and s.tensor.device.type != device)
        for tensor in (*shared, *elsewhere):
            kept.blocks.pop(tensor.untyped_storage().data_ptr(), None)
        for block in kept.blocks.values():
            block.host = self.copies.buffer(block.stop - block.start)
        kept.wait = self.copies.post([block.copy() for block in kept.blocks.values()], to_host=True)

    def free(self, at: Task) -> None:
        """Wait for that copy, then free the device memory."""
        kept = self.kept[at.key]
        kept.wait()
        for saved in kept.saved:  # checked only now: writes until here may be in the copy
            saved.leave()
        kept.saved.clear()
        for block in kept.blocks.values():
            block.memory = None

    def load(self, at: Task) -> None:
        """Allocate on the device, and post the copy back."""
        kept = self.kept[at.key]
        for block in kept.blocks.values():
            block.memory = torch.empty(block.stop, dtype=torch.uint8, device=self.copies.device)
        copies = [block.copy() for block in kept.blocks.values()]
        kept.wait = self.copies.post([(device, host) for host, device in copies], to_host=False)

    def wait_load(self, at: Task) -> None:
        """Wait for that copy. From here on only the graph keeps the memory."""
        kept = self.kept.pop(at.key)
        kept.wait()
        for block in kept.blocks.values():
            assert block.host is not None
            self.copies.give_back(block.host)
            block.host = None


def stand_in(tensor: Any) -> None:
    """Take the data from a leaf (or a list of them), of which only the gradient is needed from here on. One element is
    left, expanded to the leaf's shape. Views of the leaf keep the data."""
    for one in tensor if isinstance(tensor, (list, tuple)) else (tensor,):
        if isinstance(one, Tensor):
            one.data = one.new_empty(()).expand(one.shape)


def view_of(tensor: Tensor) -> Tensor:
    """Another tensor that shares the data of ``tensor`` and passes its gradient to it."""
    return tensor.view_as(tensor)

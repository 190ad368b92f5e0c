"""Debug mode (``config.p2p_debug``, env MEGATRON_PP_P2P_DEBUG): watches the memory of pending sends.

A send's bytes are summed when it is posted and again when it is done. After every instruction in between, debug mode
checks whether the schedule has freed, swapped or written to them. Memory that a FREE frees is filled with NaN, which
any late reader then reads. A fault raises SendBufferError with the rank, chunk, microbatch and both instructions.

This is a subclass of the engine, chosen when a step is set up, so the engine itself has no debug code. On CUDA nothing
here waits for the device before the end of the step: a debug mode that synchronises would hide the faults.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_pp.comm.communicator import Receive, Send
from megatron_pp.comm.failed_transfers import is_whole
from megatron_pp.comm.wait_handle import UNWATCHED, WaitHandle, version_of
from megatron_pp.errors import SendBufferError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.tasks import MessageKey, Task
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor

_WORDS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class WatchedExecutor(PlanExecutor):
    """The engine with a watch on the memory of its pending sends. It does not hold the tensors that it watches, because
    that would hide an early release. Raises SendBufferError."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pending: list[_PendingSend] = []
        self.returned: list[torch.Tensor] = []  # memory that the current instruction is about to free
        self.sums: list[tuple[_PendingSend, Instruction, torch.Tensor]] = []  # with whether both sums agree

    def run(self) -> None:
        wire = self.communicator.wire
        with nullcontext() if wire is None else wire.within(self):
            super().run()
        self._check_sums()

    def _handlers(self) -> dict[str, Handler]:
        return {op: partial(self._watched, handler) for op, handler in super()._handlers().items()}

    def _watched(self, handler: Handler, at: Task) -> None:
        """Check the memory of all pending sends after each instruction, and fill memory that it has freed with NaN."""
        handler(at)
        self._check(self.pending, at.instruction)
        for tensor in self.returned:
            _poison_if_free(tensor)
        self.returned.clear()

    def _backward(self, at: Task) -> None:
        # The backward has used the output. The gradient that has come back shows that its send is done.
        done = [s for s in self.pending if s.at.op == ins.SEND_F and (s.at.stage, s.at.mb, s.at.part) == at.key]
        self._check(done, at.instruction)
        self._compare(done, at.instruction)
        super()._backward(at)

    def _send_f(self, at: Task) -> None:
        self._post(super()._send_f, at)

    def _send_b(self, at: Task) -> None:
        self._post(super()._send_b, at)

    def post(self, at: Task, request: Send | Receive) -> None:
        if isinstance(request, Send):
            self._post(partial(super().post, request=request), at, request)
        else:
            super().post(at, request)

    def _post(self, handler: Handler, at: Task, request: Send | None = None) -> None:
        sends = self._noted(at, request)
        handler(at)
        self._watch_posted(at, sends)

    def _batch(self, at: Task) -> None:
        posts = [one for one in at.members if one.op in ins.SEND_OPS]
        noted = [self._noted(one) for one in posts]
        super()._batch(at)
        for one, sends in zip(posts, noted, strict=True):
            self._watch_posted(one, sends)

    def _noted(self, at: Task, given: Send | None = None) -> list[_PendingSend]:
        """The sends that ``at`` is about to post: ``given``, or the engine's own request."""
        request = given or self.request(at)
        assert isinstance(request, Send)
        value = request.value
        tensors = value if isinstance(value, (list, tuple)) else [value]
        return [_PendingSend(tensor, at.instruction) for tensor in tensors]

    def _watch_posted(self, at: Task, sends: list[_PendingSend]) -> None:
        handles: dict[MessageKey, Any] = self.handles
        handles[at.message] = _WatchedHandle(handles[at.message], sends, weakref.proxy(self))
        self.pending += sends

    def about_to_finish(self, sends: list[_PendingSend]) -> None:
        """Called when a FREE begins to wait for these sends. Their memory must be intact, unless a backward has used
        it.
        """
        self._check([send for send in sends if send in self.pending], self.instruction)

    def finished(self, sends: list[_PendingSend]) -> None:
        """Called when these sends are done and their memory has not been freed yet."""
        self.returned += self._compare([send for send in sends if send in self.pending], self.instruction)

    def _check(self, sends: list[_PendingSend], now: Instruction) -> None:
        for send in sends:
            if broken := send.broken():
                raise self._error(send, now, broken)

    def _compare(self, sends: list[_PendingSend], now: Instruction) -> list[torch.Tensor]:
        """Take the second sums of ``sends``, which are done. Returns aliases of their memory."""
        aliases = []
        for send in sends:
            self.pending.remove(send)
            there = send.bytes()
            if there is None:
                raise self._error(send, now, "freed")
            aliases.append(there)
            self.sums.append((send, now, checksum(there) == send.sum))
        if self.communicator.device.type != "cuda":
            self._check_sums()
        return aliases

    def _check_sums(self) -> None:
        """Raise for the first send whose bytes were not the same when it was done. On CUDA, waits for the device."""
        sums, self.sums = self.sums, []
        for send, now, agree in sums:
            if not bool(agree):
                raise self._error(send, now, "written to")

    def _error(self, send: _PendingSend, now: Instruction, what: str) -> SendBufferError:
        at = send.at
        of = "output" if at.op == ins.SEND_F else "input gradient"
        when = "between them" if what == "written to" else "while the send was pending"
        return SendBufferError(
            f"pipeline rank {self.rank}: the memory of the {of} of {at.where}, which {at} "
            f"posted for sending, was {what} {when}; found at {now} ({now.name}, instruction {self.position} of the "
            "plan)",
            rank=self.rank,
            chunk=at.chunk,
            microbatch=at.mb,
            posted_by=str(at),
            broken_by=str(now),
        )


class _PendingSend:
    """The place of the bytes of one sent tensor, and their sum when they were posted."""

    def __init__(self, tensor: torch.Tensor, at: Instruction) -> None:
        self.at = at
        self.sum = checksum(tensor.detach())
        self._tensor = weakref.ref(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype
        self._device = tensor.device
        # For a part of a larger tensor only the sums show whether it was written to.
        self._version = version_of(tensor) if is_whole(tensor) else UNWATCHED

    def broken(self) -> str:
        """The fault of the memory as a participle, such as "freed"; empty if there is none."""
        tensor = self._tensor()
        if tensor is None or self._storage.expired():
            return "freed"
        if StorageWeakRef(tensor.untyped_storage()).cdata != self._storage.cdata:
            return "deallocated"
        return "written to" if self._version not in (UNWATCHED, version_of(tensor)) else ""

    def bytes(self) -> torch.Tensor | None:
        """An alias of the sent bytes; None if the memory is gone."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._place)


@dataclass(eq=False)
class _WatchedHandle:
    """A WaitHandle that tells the watch before and after its ``wait``."""

    handle: WaitHandle
    sends: list[_PendingSend]
    executor: WatchedExecutor

    def wait(self) -> None:
        sends, self.sends = self.sends, []
        self.executor.about_to_finish(sends)
        self.handle.wait()
        self.executor.finished(sends)

    def check(self) -> None:
        self.handle.check()

    def is_completed(self) -> bool:
        return self.handle.is_completed()

    @property
    def what(self) -> str:
        return self.handle.what


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the bytes of ``tensor``, taken as whole numbers of its element's width: int64, on its device."""
    flat = tensor.contiguous().view(-1)
    return flat.view(_WORDS_OF[tensor.element_size()]).sum(dtype=torch.int64)


def _poison_if_free(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with NaN if nothing else holds its memory. Autograd may have kept it for a backward."""
    storage = tensor.untyped_storage()
    holders = torch._C._storage_Use_Count(storage._cdata) - 1  # less the wrapper that asks
    if holders == 1 and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.fill_(float("nan"))

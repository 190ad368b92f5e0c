"""Engines with one fault each, and a communicator core without the second defence. The race suite must catch them.

Each class overrides the one method that has the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_pp.comm.communicator import P2PCore, Receive, Send
from megatron_pp.comm.wait_handle import Tensors, WaitHandle
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.runtime.engine.swapped_outputs import deallocate_output_tensor


class ReleaseBeforeWait(PlanExecutor):
    """Frees the output's memory, and then waits for its send: Megatron-LM#4047."""

    def _wait_then_free(self, handle: WaitHandle, at: Task) -> None:
        if at.op == ins.FREE_B:
            super()._wait_then_free(handle, at)
        else:
            self.drop_data(at.key)
            self._wait_late(handle)

    def _wait_late(self, handle: WaitHandle) -> None:
        handle.wait()


class NeverWaits(ReleaseBeforeWait):
    """Drops the handle of an output's send without waiting."""

    def _wait_late(self, handle: WaitHandle) -> None:
        pass


class NoWaitInWarmup(ReleaseBeforeWait):
    """Waits for sends only after a backward has run."""

    def _wait_then_free(self, handle: WaitHandle, at: Task) -> None:
        ran = self.program[: self.position]
        if at.op == ins.FREE_F and any(done.op in ins.BACKWARD_OPS for done in ran):
            handle.wait()
        super()._wait_then_free(handle, at)

    def _wait_late(self, handle: WaitHandle) -> None:
        pass


class WaitsOnPreviousMicrobatch(PlanExecutor):
    """FREE waits on the handle of the previous send."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.kept: dict[int, WaitHandle] = {}

    def _wait_then_free(self, handle: WaitHandle, at: Task) -> None:
        if at.op == ins.FREE_F:
            previous = self.kept.get(at.stage)
            self.kept[at.stage] = handle
            handle = previous or _Done()
        super()._wait_then_free(handle, at)


class WaitsOnAnotherHandle(PlanExecutor):
    """FREE waits on another pending handle: the last one on the other kind of channel."""

    def _free(self, at: Task) -> None:
        if at.op == ins.FREE_F:
            others = [handle for (op, *_), handle in self.handles.items() if op == ins.SEND_B]
            self.handles[at.message] = others[-1] if others else _Done()
        super()._free(at)


class DeallocatesTheNext(PlanExecutor):
    """FREE waits on the right handle, and frees the output of the next microbatch, if there is one."""

    def _wait_then_free(self, handle: WaitHandle, at: Task) -> None:
        if at.op == ins.FREE_B:
            super()._wait_then_free(handle, at)
            return
        handle.wait()
        deallocate_output_tensor(self.outputs.get((at.stage, at.mb + 1, at.part)), True)


class DropsGradientInFlight(PlanExecutor):
    """Drops the input gradient before its send is done."""

    def _wait_then_free(self, handle: WaitHandle, at: Task) -> None:
        if at.op == ins.FREE_B:
            del self.input_grads[at.key]
            handle.wait()
        else:
            super()._wait_then_free(handle, at)


class DropsGradientWhenPosted(PlanExecutor):
    """Drops the input gradient as soon as its send is posted."""

    def _send_b(self, at: Task) -> None:
        super()._send_b(at)
        self.input_grads[at.key] = None

    def _batch(self, at: Task) -> None:
        super()._batch(at)
        for one in at.members:
            if one.op == ins.SEND_B:
                self.input_grads[one.key] = None


class ReadsBeforeItArrived(PlanExecutor):
    """WAIT returns the buffer of a receive without waiting."""

    def _wait_f(self, at: Task) -> None:
        self.inputs[at.key] = self.handles.pop(at.message).tensor


class ReadsGradientBeforeItArrived(PlanExecutor):
    """``ReadsBeforeItArrived`` for gradients."""

    def _wait_b(self, at: Task) -> None:
        self.output_grads[at.key] = self.handles.pop(at.message).tensor


class DeallocatesWhatItDefers(PlanExecutor):
    """If the transport knows that a send is unfinished, it puts off the release, but not the deallocation."""

    def _free(self, at: Task) -> None:
        handle = self.handles[at.message]
        if self.max_deferred and not handle.is_completed() and at.op == ins.FREE_F:
            self.drop_data(at.key)
        super()._free(at)


class _Done:
    """A handle that is complete."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class OwnsNothing(P2PCore):
    """Sends the schedule's own tensor, and its handles keep nothing, as before handles owned the bytes. Shapes that are
    sent ahead are kept.
    """

    def aliases(self, value: Tensors, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        super().aliases(value, dtype)
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)

    def post_send(self, value: Tensors, peer: int, channel: str, dtype: torch.dtype | None = None) -> WaitHandle:
        if isinstance(value, torch.Tensor) and not self.variable_shapes:
            work = self.transport.isend(value, peer, channel)
            return WaitHandle(self, (work,), None, None, "send", peer, channel)
        return _disown(super().post_send(value, peer, channel, dtype))

    def post_batch(self, requests: Sequence[Send | Receive]) -> list[WaitHandle]:
        handles = super().post_batch(requests)
        return [_disown(h) if isinstance(r, Send) else h for r, h in zip(requests, handles, strict=True)]


def _disown(handle: WaitHandle) -> WaitHandle:
    held = handle._held
    kept = held if isinstance(held, (list, tuple)) else [held]
    handle._held = [t for t in kept if t.dtype == torch.int64]
    return handle


# Faults that the second defence (the handle owns the bytes) makes harmless, and faults that it does not.
EARLY_RELEASES: tuple[type[PlanExecutor], ...] = (
    ReleaseBeforeWait,
    NeverWaits,
    NoWaitInWarmup,
    WaitsOnPreviousMicrobatch,
    WaitsOnAnotherHandle,
    DropsGradientInFlight,
    DropsGradientWhenPosted,
    DeallocatesWhatItDefers,
)
WRONG_READS: tuple[type[PlanExecutor], ...] = (ReadsBeforeItArrived, ReadsGradientBeforeItArrived, DeallocatesTheNext)

"""Engines with one fault each, and a communicator core without the second wall: what the race suite has to catch.

Each class overrides the one method that the fault sits in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_pp.engine import Key, PlanExecutor
from megatron_pp.output_lifetime import deallocate_output_tensor
from megatron_pp.p2p_core import P2PCore, Receive, Send
from megatron_pp.plan import instruction as ins
from megatron_pp.wait_handle import Tensors, WaitHandle


class ReleaseBeforeWait(PlanExecutor):
    """The output's memory is given back, then its send is waited for: Megatron-LM#4047."""

    def _wait_then_deallocate(self, handle: WaitHandle, key: Key) -> None:
        self._drop_data(key)
        handle.wait()


class NeverWaits(ReleaseBeforeWait):
    """The handle of an output's send is dropped unwaited."""

    def _wait_then_deallocate(self, handle: WaitHandle, key: Key) -> None:
        self._drop_data(key)


class NoWaitInWarmup(ReleaseBeforeWait):
    """Sends are waited for only once a backward has run."""

    def _wait_then_deallocate(self, handle: WaitHandle, key: Key) -> None:
        ran = self.program[: self.position]
        if any(at.op == ins.BACKWARD for at in ran):
            handle.wait()
        self._drop_data(key)


class WaitsOnPreviousMicrobatch(PlanExecutor):
    """RELEASE waits on the handle of the send before."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.kept: dict[int, WaitHandle] = {}

    def _wait_then_deallocate(self, handle: WaitHandle, key: Key) -> None:
        previous = self.kept.get(key[0])
        self.kept[key[0]] = handle
        super()._wait_then_deallocate(previous or _Done(), key)


class WaitsOnAnotherHandle(PlanExecutor):
    """RELEASE waits on any other pending handle: the one posted last on the other kind of channel."""

    def _release_act(self, key: Key) -> None:
        del self.act_sends[key]
        others = list(self.grad_sends.values())
        self._release(others[-1] if others else _Done(), self._wait_then_deallocate, key)


class DeallocatesTheNext(PlanExecutor):
    """RELEASE waits on the right handle and gives back the output of the microbatch that follows, if there is one."""

    def _wait_then_deallocate(self, handle: WaitHandle, key: Key) -> None:
        handle.wait()
        following = (key[0], key[1] + 1)
        deallocate_output_tensor(self.outputs.get(following), True)


class DropsGradientInFlight(PlanExecutor):
    """The input gradient goes before its send is done."""

    def _wait_then_drop(self, handle: WaitHandle, key: Key) -> None:
        del self.input_grads[key]
        handle.wait()


class DropsGradientWhenPosted(PlanExecutor):
    """The input gradient goes as soon as its send is posted."""

    def _send_grad(self, key: Key) -> None:
        super()._send_grad(key)
        self.input_grads[key] = None

    def _batch(self, members: Sequence[Any]) -> None:
        super()._batch(members)
        for at in members:
            if at.op == ins.SEND_B:
                self.input_grads[(at.chunk, at.mb)] = None


class ReadsBeforeItArrived(PlanExecutor):
    """WAIT takes the buffer of a receive without waiting."""

    def _wait_act(self, key: Key) -> None:
        handle = self.act_receives.pop(key)
        self.inputs[key] = handle.tensor


class ReadsGradientBeforeItArrived(PlanExecutor):
    """The same for gradients."""

    def _wait_grad(self, key: Key) -> None:
        handle = self.grad_receives.pop(key)
        self.output_grads[key] = handle.tensor


class DeallocatesWhatItDefers(PlanExecutor):
    """Where the transport tells that a send is still on its way, the release is put off, but not the deallocation."""

    def _release(self, handle: WaitHandle, finish: Callable[[WaitHandle, Key], None], key: Key) -> None:
        if self.max_deferred and not handle.is_completed() and finish == self._wait_then_deallocate:
            self._drop_data(key)
        super()._release(handle, finish, key)


class _Done:
    """A handle of nothing."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class OwnsNothing(P2PCore):
    """Sends go out on the schedule's own tensor and the handle keeps nothing: the state of things before the handle
    owned the bytes. Shapes that travel ahead stay.
    """

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        super()._alias(tensor)
        return tensor

    def post_send(self, value: Tensors, peer: int, channel: str) -> WaitHandle:
        if isinstance(value, torch.Tensor) and not self.variable_shapes:
            work = self.transport.isend(value, peer, channel)
            return WaitHandle(self, (work,), None, None, "send", peer, channel)
        return _disown(super().post_send(value, peer, channel))

    def post_batch(self, requests: Sequence[Send | Receive]) -> list[WaitHandle]:
        handles = super().post_batch(requests)
        return [_disown(h) if isinstance(r, Send) else h for r, h in zip(requests, handles, strict=True)]


def _disown(handle: WaitHandle) -> WaitHandle:
    held = handle._held
    kept = held if isinstance(held, (list, tuple)) else [held]
    handle._held = [t for t in kept if t.dtype == torch.int64]
    return handle


# Faults that the second wall (the handle owns the bytes) makes harmless, and those that it can not.
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

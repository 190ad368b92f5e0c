"""Engines and transports with a fault that only an optional rule of the device shows (``DeviceRules``)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_pp.comm.channels import ChannelKey
from megatron_pp.comm.nccl.nccl_transport import NcclChannels, NcclTransport
from megatron_pp.comm.transport import Preparation, Work
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.executor import PlanExecutor


class PostsReceivesTwoAhead(PlanExecutor):
    """Each time it posts a receive of an activation, it also posts the next one."""

    def _recv_f(self, at: Task) -> None:
        if at.message not in self.handles:
            super()._recv_f(at)
        later = (one for one in self.plan.tasks(self.rank)[self.position + 1 :] if one.op == ins.RECV_F)
        one = next(later, None)
        if one is not None and one.message not in self.handles:
            super()._recv_f(one)


class PostsFirstGradientAtOnce(PlanExecutor):
    """Posts the receive of the first gradient before the first forward."""

    def run(self) -> None:
        self.ahead = next((one for one in self.plan.tasks(self.rank) if one.op == ins.RECV_B), None)
        super().run()

    def _forward(self, at: Task) -> None:
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            super()._recv_b(ahead)
        super()._forward(at)

    def _recv_b(self, at: Task) -> None:
        if at.message not in self.handles:
            super()._recv_b(at)


class PostsGradientsHalfway(PlanExecutor):
    """After the third backward, when every kernel is loaded, it posts the receives of all remaining gradients, in order
    on one-way channels."""

    backwards = 0

    def _backward(self, at: Task) -> None:
        super()._backward(at)
        self.backwards += 1
        if self.backwards == 3:
            for one in self.plan.tasks(self.rank)[self.position + 1 :]:
                if one.op == ins.RECV_B:
                    self._recv_b(one)

    def _recv_b(self, at: Task) -> None:
        if at.message not in self.handles:
            super()._recv_b(at)


class WarmsNothingUp(NcclTransport):
    """Makes communicators at the first transfers of a step (Megatron-LM#5240, pytorch#129140)."""

    def _warm_up(self, needs: Preparation, made: list[ChannelKey]) -> None:
        """Does nothing."""


class WaitsForTheLast(NcclTransport):
    """Waits for the last post: on one communicator all earlier posts are over then."""

    last: Any = None

    def _post(self, *posted: Any) -> Work:
        self.last = super()._post(*posted)
        return _UntilTheLast(self)


class _UntilTheLast:
    def __init__(self, transport: WaitsForTheLast) -> None:
        self.transport = transport

    def wait(self, *timeout: Any) -> bool:
        return self.transport.last.wait(*timeout)

    def is_completed(self) -> bool:
        return self.transport.last.is_completed()


class AbortsToClose(NcclChannels):
    """Ends its channels by an abort as soon as the device is done with its sends. Messages that peers have not received
    are lost."""

    def end(self, group: dist.ProcessGroup) -> None:
        group.abort()

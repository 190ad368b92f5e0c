"""Engines and transports with a fault that only a further rule of the device shows (``DeviceRules``)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_pp.comm.channels import ChannelKey
from megatron_pp.comm.nccl.nccl_transport import NcclChannels, NcclTransport
from megatron_pp.comm.transport import Preparation, Work
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.executor import PlanExecutor


class PostsReceivesTwoAhead(PlanExecutor):
    """With a receive of an activation, the next one is posted."""

    def _recv_f(self, at: Task) -> None:
        if at.message not in self.handles:
            super()._recv_f(at)
        later = (one for one in self.plan.tasks(self.rank)[self.position + 1 :] if one.op == ins.RECV_F)
        one = next(later, None)
        if one is not None and one.message not in self.handles:
            super()._recv_f(one)


class PostsFirstGradientAtOnce(PlanExecutor):
    """The receive of the first gradient is posted before the first forward."""

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
    """Behind the third backward, when every kernel is loaded, the receives of all gradients that are left are posted:
    on one-way channels, in their order."""

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
    """Communicators are made by the first transfers of a step (Megatron-LM#5240, pytorch#129140)."""

    def _warm_up(self, needs: Preparation, made: list[ChannelKey]) -> None:
        """Nothing."""


class WaitsForTheLast(NcclTransport):
    """A wait is for what was posted last: on one communicator, all that was posted before is over then."""

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
    """Ends its channels by an abort once the device is done with its sends; what their peers have not taken is lost."""

    def end(self, group: dist.ProcessGroup) -> None:
        group.abort()

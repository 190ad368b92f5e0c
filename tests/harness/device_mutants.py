"""Engines with a fault that only a further rule of the device shows (``megatron_pp.testing.streams.DeviceRules``)."""

from __future__ import annotations

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

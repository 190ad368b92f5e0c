"""Engines with a fault that only streams show: what ``megatron_pp.testing.streams`` has to catch beside the faults of
``executor_mutants``."""

from __future__ import annotations

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.instruction import Instruction
from megatron_pp.runtime.executor import PlanExecutor


class FreesWhenPosted(PlanExecutor):
    """Megatron-LM#4047: an output's memory is given back as soon as its send is posted; the send is waited for later,
    where FREE stands."""

    def _send_f(self, at: Instruction) -> None:
        super()._send_f(at)
        self._drop_data(at[1:3])

    def _batch(self, at: Instruction) -> None:
        super()._batch(at)
        for one in at.members:
            if one.op == ins.SEND_F:
                self._drop_data(one[1:3])


class WritesIntoOutput(PlanExecutor):
    """An output is written to while its send is pending."""

    def _send_f(self, at: Instruction) -> None:
        super()._send_f(at)
        self.outputs[at[1:3]].data.mul_(2.0)


class WritesIntoGradient(PlanExecutor):
    """The same for an input gradient."""

    def _send_b(self, at: Instruction) -> None:
        super()._send_b(at)
        self.input_grads[at[1:3]].mul_(2.0)


class FreesPostedReceive(PlanExecutor):
    """The buffer of a receive is given back while the receive is posted, and another one used."""

    def _recv_f(self, at: Instruction) -> None:
        super()._recv_f(at)
        buffer = self.receives[ins.RECV_F][at[1:3]].tensor
        buffer.data = buffer.data.new_zeros(buffer.shape)

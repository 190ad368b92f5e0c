"""Engines with a fault that only streams show. ``testkit.streams`` must catch them, as well as those of
``executor_mutants``. Also engines that are right, but lose time."""

from __future__ import annotations

from typing import Any

import torch

from megatron_pp.comm.communicator import Receive, Send
from megatron_pp.features.pairs.pair_runner import HalfCall, PairRunner, _streams
from megatron_pp.features.skip_tensors.skip_runner import SkipRunner
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from megatron_pp.testing.memory_transport import End, Queue
from megatron_pp.testing.toy import ToyBlock
from testkit.streams import StreamNetwork
from testkit.streams.network import StreamWork


class _AfterPosting(PlanExecutor):
    """Calls ``posted`` right after each send and receive was posted, alone or in a batch."""

    def posted(self, at: Task) -> None:
        raise NotImplementedError

    def _send_f(self, at: Task) -> None:
        super()._send_f(at)
        self.posted(at)

    def _send_b(self, at: Task) -> None:
        super()._send_b(at)
        self.posted(at)

    def _recv_f(self, at: Task) -> None:
        super()._recv_f(at)
        self.posted(at)

    def _batch(self, at: Task) -> None:
        super()._batch(at)
        for one in at.members:
            self.posted(one)


class FreesWhenPosted(_AfterPosting):
    """Frees an output's memory as soon as its send is posted, and waits for the send later, at FREE:
    Megatron-LM#4047."""

    def posted(self, at: Task) -> None:
        if at.op == ins.SEND_F:
            self.drop_data(at.key)


class WritesIntoOutput(_AfterPosting):
    """Writes to an output while its send is pending."""

    def posted(self, at: Task) -> None:
        if at.op == ins.SEND_F:
            self.outputs[at.key].data.mul_(2.0)


class WritesIntoGradient(_AfterPosting):
    """Writes to an input gradient while its send is pending."""

    def posted(self, at: Task) -> None:
        if at.op == ins.SEND_B:
            self.input_grads[at.key].data.mul_(2.0)


class DropsNamedWhenPosted(PlanExecutor):
    """Frees the memory of a named tensor as soon as its send is posted. Later uses have a copy."""

    def post(self, at: Task, request: Send | Receive) -> None:
        super().post(at, request)
        (skips,) = (one for one in self.features if isinstance(one, SkipRunner))
        if at.op == ins.SEND_F:
            sent = skips.request(at)[0]
            held = skips.held
            (key,) = (key for key, tensor in held.items() if tensor is sent)
            held[key] = sent.detach().clone().requires_grad_(sent.requires_grad)


class FreesPostedReceive(_AfterPosting):
    """Frees the buffer of a receive while the receive is pending, and uses another one. (With variable shapes there is
    no buffer yet.)"""

    def posted(self, at: Task) -> None:
        if at.op == ins.RECV_F:
            buffer = self.handles[at.message].tensor
            assert isinstance(buffer, torch.Tensor)
            buffer.data = buffer.data.new_zeros(buffer.shape)


class WaitsAtOnce(_AfterPosting):
    """Lets the compute stream wait for each send right after it was posted."""

    def posted(self, at: Task) -> None:
        if at.op in ins.SEND_OPS:
            self.handles[at.message].wait()


class TransfersOnComputeStream(StreamNetwork):
    """Communicators have no stream of their own."""

    sends_only = False

    def post(self, rank: int, queue: Queue, ends: list[End], *more: Any) -> StreamWork:
        if not self.sends_only or all(end.is_send for end in ends):
            self._lanes[queue] = self.devices[rank].stream
        return super().post(rank, queue, ends, *more)


class SendsOnComputeStream(TransfersOnComputeStream):
    """Communicators that send have no stream of their own."""

    sends_only = True


def forwards_on_the_side(forward_call: HalfCall, backward_call: HalfCall) -> None:
    """The former rule of ``on_two_streams``: each forward runs on the other stream, so autograd runs its backward there
    too."""
    current = torch.cuda.current_stream()
    side, events, _ = _streams(current.device)
    events.order(current, side)
    with torch.cuda.stream(side):
        forward_call()
    backward_call()
    events.order(side, current)


class ReadsWhatABackwardLeft(PairRunner):
    """Computes weight gradients of backwards outside of pairs on the caller's stream, without waiting for the forward's
    stream. Stage 0 has no input gradient for which autograd would wait."""

    def _alone(self, handler: Handler, at: Task) -> None:
        handler(at)


class MainGradBlock(ToyBlock):
    """A block with a hook that copies the weight's gradient to ``main_grad`` on its own stream. This stream waits for
    that of AccumulateGrad."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.copies = torch.cuda.Stream()
        self.of_backward = torch.cuda.current_stream()
        weight = self.linear.weight
        weight.grad, self.main_grad = torch.zeros_like(weight), torch.zeros_like(weight)
        weight.register_post_accumulate_grad_hook(self._copy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        output.register_hook(self._note)
        return output

    def _note(self, grad: torch.Tensor) -> None:
        self.of_backward = torch.cuda.current_stream()

    def written_on(self) -> torch.cuda.Stream:
        """The stream on which the gradient was added to the weight's gradient."""
        return torch.cuda.current_stream()

    def _copy(self, weight: torch.Tensor) -> None:
        self.copies.wait_stream(self.written_on())
        with torch.cuda.stream(self.copies):
            self.main_grad.copy_(weight.grad)
        torch.cuda.current_stream().wait_stream(self.copies)


class ReadsOnTheStreamOfTheForward(MainGradBlock):
    """The copy waits for the stream of the layer's backward instead."""

    def written_on(self) -> torch.cuda.Stream:
        return self.of_backward


class InnerGradBlock(ToyBlock):
    """A block with a hook that reads an inner gradient on its own stream. This stream waits for that of the
    backward."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.looks = torch.cuda.Stream()
        self.of_step = torch.cuda.current_stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x))
        hidden.register_hook(self._look)
        return hidden * self.scale + x

    def backward_runs_on(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream()

    def _look(self, grad: torch.Tensor) -> None:
        self.looks.wait_stream(self.backward_runs_on())
        with torch.cuda.stream(self.looks):
            grad.abs().max()
        torch.cuda.current_stream().wait_stream(self.looks)


class LooksOnTheStreamOfTheCaller(InnerGradBlock):
    """The hook's stream waits for the stream on which the step, and so each backward, is called."""

    def backward_runs_on(self) -> torch.cuda.Stream:
        return self.of_step


class TwoBranchBlock(ToyBlock):
    """A block with a branch on its own stream, like shared experts. Its backward uses data that the other branch has
    left."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            branch = x * self.scale
        branch.register_hook(self._use)
        hidden = torch.tanh(self.linear(x))
        hidden.register_hook(self._leave)
        current.wait_stream(self.side)
        return hidden + branch

    def _leave(self, grad: torch.Tensor) -> None:
        self.left = grad * 2
        self.of_left = torch.cuda.current_stream()

    def _use(self, grad: torch.Tensor) -> None:
        self.wait_for_left()
        (grad + self.left).max()
        self.of_left.wait_stream(torch.cuda.current_stream())

    def wait_for_left(self) -> None:
        torch.cuda.current_stream().wait_stream(self.of_left)


class UsesWhatTheOtherBranchLeft(TwoBranchBlock):
    """Relies on autograd, which runs the other branch first."""

    def wait_for_left(self) -> None:
        """Does not wait."""

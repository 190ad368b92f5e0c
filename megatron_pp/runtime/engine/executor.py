"""The engine: executes one rank's plan, one dispatch per instruction.

The state of a step is in dictionaries with keys (stage, microbatch, part), which are empty at the end. The engine knows
no schedule: the plan has the order, the communication and the releases, and was verified before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megatron_pp.comm.communicator import P2PCore, Receive, Send, is_single_shape
from megatron_pp.comm.transport import ACT, GRAD
from megatron_pp.comm.wait_handle import WaitHandle
from megatron_pp.errors import SendBufferError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import STATIC_BUFFERS, Plan
from megatron_pp.plan.ir.tasks import Cell, MessageKey, Task
from megatron_pp.runtime.engine.compute import Activation, Shapes, each_tensor, in_one_block
from megatron_pp.runtime.engine.gradient_hooks import SyncHooks

if TYPE_CHECKING:
    from megatron_pp.runtime.engine.parts import Steps

Handler = Callable[[Task], None]


class Feature(Protocol):
    """Runs the instructions that a setting or a schedule adds to plans."""

    @property
    def tables(self) -> Mapping[str, Mapping[Any, Any]]:
        """The feature's tables of the step, which must be empty at the end; an error calls them by these names."""

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        """Add the feature's handlers, by op, to ``handlers``, and replace the ``calls`` of ``engine`` that it
        changes."""


def _no_names(at: Task) -> Any:
    raise AssertionError(f"{at.instruction}: no feature of this step gives messages names; this is a fault of the plan")


@dataclass
class Calls:
    """What the handlers of a step call. A feature may put a call of its own around one that it finds here.

    forward        of a chunk, with its input
    backward       of a chunk, with its input, its output, and the output's gradient
    around         the context in which all instructions run
    named_request  makes the request of a message that has a name
    named_release  frees what such a message has sent"""

    forward: Callable[[Task, Activation], Activation]
    backward: Callable[[Task, Activation, Any, Activation], Activation]
    around: AbstractContextManager[None] = field(default_factory=nullcontext)
    named_request: Callable[[Task], Send | Receive] = _no_names
    named_release: Callable[[Task], None] = _no_names


@dataclass(eq=False)
class PlanExecutor:
    """Executes ``plan`` on the communicator's rank, once. ``position`` is the index of the current instruction, -1
    before the first. ``shapes`` are those of the messages, by part; whole microbatches have one part. ``calls`` are
    there while it runs."""

    plan: Plan
    communicator: P2PCore
    steps: Steps
    hooks: SyncHooks
    shapes: Sequence[Shapes]
    _: KW_ONLY
    deallocate: bool = True
    max_pending_sends: int = 2
    message_bytes: float = 0  # size of the largest message; 0: not known
    graph_in_evaluation: bool = False
    observer: Any = None  # an Observer, or None
    features: Sequence[Feature] = ()
    tasks: Sequence[Task] | None = None  # of the rank, where they have been looked up
    calls: Calls = field(init=False)

    def __post_init__(self) -> None:
        plan, communicator = self.plan, self.communicator
        sent = self.shapes[0].send  # those of whole sequences are at the index NONE, the last one, too
        self.rank = communicator.rank
        self._checks_outputs = communicator.size > 1
        # The shape that each output must have; None if several tensors are sent or shapes vary.
        single = communicator.size > 1 and not communicator.shapes_vary and sent and is_single_shape(sent)
        self._sent_shapes = [tuple(shapes.send) if single else None for shapes in self.shapes]
        self.forward_only = plan.spec.forward_only
        self.graphs = self.graph_in_evaluation or not self.forward_only  # whether stages may build autograd graphs
        self.position = -1
        self.dispatch: dict[str, Handler] = {}  # of the step that runs, with the observer's handlers around ours
        self.placement = plan.placement
        self.loss_stage = plan.placement.num_stages - 1  # NONE where no stage gives the loss
        self.inputs: dict[Cell, Activation] = {}
        self.outputs: dict[Cell, Activation] = {}
        self.output_grads: dict[Cell, Activation] = {}
        self.input_grads: dict[Cell, Activation] = {}
        self.handles: dict[MessageKey, WaitHandle] = {}  # of messages that are posted and not yet waited for
        self.deferred: deque[tuple[WaitHandle, Task]] = deque()
        self.max_deferred = communicator.transport.unfinished_sends(self.max_pending_sends, self.message_bytes)
        self._finished_in_place = ins.FREE_B if STATIC_BUFFERS in plan.spec.device else None
        self._sync_open = False
        self.within: Instruction | None = None  # of a group, the member that is being executed, if one is noted

    def run(self) -> None:
        """Execute every instruction. Afterwards this object holds no tensor or handle of the step."""
        try:
            self.calls = Calls(self.call_forward, self.call_backward)
            handlers = self.dispatch = self._handlers()
            if not self.forward_only:
                self.hooks.disable_grad_sync()
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.graphs), self.calls.around:
                for position, at in enumerate(self.tasks or self.plan.tasks(self.rank)):
                    self.position = position
                    handlers[at.op](at)
                self._settle(0)
        finally:  # also after a failure: if the user goes on, gradients of later steps must not stay local
            self.hooks.enable_grad_sync()
            self.dispatch = {}
            del self.calls
        self._check_nothing_left()

    @property
    def program(self) -> Sequence[Instruction]:
        return self.plan.programs[self.rank]

    @property
    def instruction(self) -> Instruction:
        """The instruction that is being executed; after the end, the last one. Within a group it may be a member."""
        return self.within or self.program[max(self.position, 0)]

    def _handlers(self) -> dict[str, Handler]:
        handlers: dict[str, Handler] = {
            ins.FORWARD: self._forward,
            ins.BACKWARD: self._backward,
            ins.INPUT_GRAD: self._backward,
            ins.WEIGHT_GRAD: self._weight_grad,
            ins.RECV_F: self._recv_f,
            ins.WAIT_F: self._wait_f,
            ins.SEND_F: self._send_f,
            ins.FREE_F: self._free,
            ins.HAND_F: self._hand_f,
            ins.RECV_B: self._recv_b,
            ins.WAIT_B: self._wait_b,
            ins.SEND_B: self._send_b,
            ins.FREE_B: self._free,
            ins.HAND_B: self._hand_b,
            ins.PARAM_SYNC: self._param_sync,
            ins.ENABLE_GRAD_SYNC: self._enable_grad_sync,
            ins.GRAD_SYNC: self._grad_sync,
            ins.BATCH: self._batch,
        }
        for feature in self.features:
            feature.attach(self, handlers)
        if self.observer is None:
            return handlers
        return {op: h if op in ins.JOINED_OPS else partial(self._observed, h) for op, h in handlers.items()}

    def _observed(self, handler: Handler, at: Task) -> None:
        self.observer.begin(at.instruction)
        try:
            handler(at)
        finally:
            self.observer.end(at.instruction)

    def _forward(self, at: Task) -> None:
        key = at.key
        given = self.inputs.pop(key, None) if self.forward_only else self.inputs.get(key)
        output = self.calls.forward(at, given)
        if at.stage == self.loss_stage:
            if not self.forward_only:
                self.outputs[key] = output
            return
        expected = self._sent_shapes[at.part]
        is_tensor = isinstance(output, torch.Tensor)  # a nested one has no shape; its send refuses it
        if self._checks_outputs and not (is_tensor and (output.is_nested or output.shape == expected)):
            from megatron_pp.runtime.engine.output_check import check_output

            check_output(at, output, self.shapes[at.part].send, self.placement, self.communicator.shapes_vary)
        if self.forward_only and self.graphs:
            output = each_tensor(methodcaller("detach"), output)  # the graph ends with the forward, not with the send
        if not (is_tensor and output.is_contiguous()) and self.placement.crosses_ranks(at.stage):
            output = each_tensor(in_one_block, output)
        self.outputs[key] = list(output) if not is_tensor and isinstance(output, (list, tuple)) else output

    def _backward(self, at: Task) -> None:
        """A full backward, or an input gradient. Both compute all gradients, unless a feature leaves those of weights
        for later."""
        key = at.key
        for handle, sent in self.deferred:
            if sent.key == key and sent.op == ins.FREE_F:  # a backward may write to tensors that the forward saved
                try:
                    handle.check()
                except SendBufferError as error:
                    raise self._named(error, sent) from error
        given, output = self.inputs.pop(key, None), self.outputs.pop(key)
        output_grad = self.output_grads.pop(key, None)
        if output_grad is None and at.stage != self.loss_stage:
            output = None  # the next stage, on this rank, does not use it
        grad = self.calls.backward(at, given, output, output_grad)
        if given is not None:
            is_ready = isinstance(grad, torch.Tensor) and grad.is_contiguous()
            if not is_ready and self.placement.crosses_ranks(at.stage - 1):  # a stage of this rank may get None
                from megatron_pp.runtime.engine.input_grads import ready_to_send

                grad = ready_to_send(grad, given, at)
            self.input_grads[key] = grad
        if self._sync_open:
            self.close_sync()

    def call_forward(self, at: Task, given: Activation) -> Activation:
        """The forward of a chunk, without what features add."""
        return self.steps.forward(at.chunk, at.mb, given)

    def call_backward(self, at: Task, given: Activation, output: Any, output_grad: Activation) -> Activation:
        """The backward of a chunk, without what features add."""
        return self.steps.backward(at.chunk, at.mb, given, output, output_grad)

    def _weight_grad(self, at: Task) -> None:
        self.close_sync()  # the backward has computed the weight gradients, unless a feature has left them for now

    def _recv_f(self, at: Task) -> None:
        handle = self.communicator.post_recv(self.shapes[at.part].receive, at.peer, ACT, self.graphs)
        self.handles[at.message] = handle

    def _wait_f(self, at: Task) -> None:
        handle = self.handles.pop(at.message)
        handle.wait()
        self.inputs[at.key] = handle.tensor

    def _recv_b(self, at: Task) -> None:
        self.handles[at.message] = self.communicator.post_recv(self.shapes[at.part].send, at.peer, GRAD, False)

    def _wait_b(self, at: Task) -> None:
        handle = self.handles.pop(at.message)
        handle.wait()
        self.output_grads[at.key] = handle.tensor

    def _send_f(self, at: Task) -> None:
        self.handles[at.message] = self.communicator.post_send(self.outputs[at.key], at.peer, ACT)

    def _send_b(self, at: Task) -> None:
        self.handles[at.message] = self.communicator.post_send(self.input_grads[at.key], at.peer, GRAD)

    def _batch(self, at: Task) -> None:
        requests = [self.request(one) for one in at.members]
        for one, handle in zip(at.members, self.communicator.post_batch(requests), strict=True):
            self.handles[one.message] = handle

    def post(self, at: Task, request: Send | Receive) -> None:
        """Post ``request`` for ``at``; its handle is kept until the instruction that waits for it."""
        call: Any = self.communicator.post_send if isinstance(request, Send) else self.communicator.post_recv
        self.handles[at.message] = call(*request)

    def request(self, at: Task) -> Send | Receive:
        if at.tensor:
            return self.calls.named_request(at)
        if at.op == ins.SEND_F:
            return Send(self.outputs[at.key], at.peer, ACT)
        if at.op == ins.SEND_B:
            return Send(self.input_grads[at.key], at.peer, GRAD)
        if at.op == ins.RECV_F:
            return Receive(self.shapes[at.part].receive, at.peer, ACT, self.graphs)
        return Receive(self.shapes[at.part].send, at.peer, GRAD, False)

    def _free(self, at: Task) -> None:
        """Finish a send now, or a few sends later if the transport can report that the send is not done yet."""
        handle = self.handles.pop(at.message)
        if self.max_deferred and at.op != self._finished_in_place and not handle.is_completed():
            self.deferred.append((handle, at))
        else:
            self._wait_then_free(handle, at)
        if self.deferred:
            self._settle(self.max_deferred)

    def _wait_then_free(self, handle: WaitHandle, at: Task) -> None:
        """The one place that frees memory after a send, and only once the send is done (Megatron-LM#4047)."""
        try:
            handle.wait()
        except SendBufferError as error:
            raise self._named(error, at) from error
        if at.tensor:
            self.calls.named_release(at)
        elif at.op == ins.FREE_B:
            del self.input_grads[at.key]
        else:
            self.drop_data(at.key)

    def _named(self, error: SendBufferError, at: Task) -> SendBufferError:
        """The error with the name of the output or gradient that was written to; in debug mode it has the name."""
        from megatron_pp.runtime.engine import written_sends

        return written_sends.named(error, at, self.rank, str(self.instruction))

    def drop_data(self, key: Cell) -> None:
        """Drop an output's data and keep what its backward needs."""
        if self.forward_only:
            del self.outputs[key]
        elif self.deallocate and key in self.outputs:  # the backward may have used the output up already
            self.outputs[key] = self.steps.backward_root(self.outputs[key])

    def _settle(self, most: int) -> None:
        """Finish deferred sends, oldest first: those that are done, and those beyond ``most``. On gloo it is then the
        older half, because the newest sends may have to wait for the peer."""
        if len(self.deferred) > most and not self.communicator.transport.pollable:
            most //= 2
            for handle, _ in [*reversed(self.deferred)][most:]:  # waiting for a channel's last send waits for all
                with suppress(SendBufferError):  # raised again below
                    handle.wait()
        while self.deferred and (len(self.deferred) > most or self.deferred[0][0].is_completed()):
            self._wait_then_free(*self.deferred.popleft())

    def _hand_f(self, at: Task) -> None:
        source = (at.stage - 1, at.mb, at.part)
        output, several = self.outputs[source], isinstance(self.outputs[source], (list, tuple))
        made = [tensor.detach().requires_grad_(self.graphs) for tensor in (output if several else [output])]
        self.inputs[at.key] = made if several else made[0]
        self.drop_data(source)

    def _hand_b(self, at: Task) -> None:
        key = at.key
        grads = self.input_grads.pop((at.stage + 1, at.mb, at.part))
        if isinstance(grads, list):
            from megatron_pp.runtime.engine.input_grads import used_outputs

            self.outputs[key], self.output_grads[key] = used_outputs(self.outputs[key], grads)
        else:
            self.output_grads[key] = grads

    def _param_sync(self, at: Task) -> None:
        self.hooks.param_sync(at.chunk)

    def _enable_grad_sync(self, at: Task) -> None:
        self.hooks.enable_grad_sync(at.chunk)
        self._sync_open = True

    def _grad_sync(self, at: Task) -> None:
        self.hooks.grad_sync(at.chunk, self.position)

    def close_sync(self) -> None:
        """Close the gradient hooks again after the one backward that ENABLE_GRAD_SYNC opened them for."""
        if self._sync_open:
            self._sync_open = False
            self.hooks.disable_grad_sync(self.position)

    def _check_nothing_left(self) -> None:
        tables: dict[str, Mapping[Any, Any]] = {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "output gradients": self.output_grads,
            "input gradients": self.input_grads,
            "handles": self.handles,
        }
        for feature in self.features:
            tables |= feature.tables
        left = {name: sorted(table) for name, table in tables.items() if table}
        if left:
            what = f"the plan ended with tensors or handles left: {left}"
            raise AssertionError(f"rank {self.rank}: {what}; this is a fault of the engine")

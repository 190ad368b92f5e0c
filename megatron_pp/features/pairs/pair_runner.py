"""Runs the forward of one microbatch together with the backward of another.

Set ``config.overlapped_forward_backward`` to ``in_turn``, ``on_two_streams`` or a function of your own: plans then
have pairs (``pair_instructions.py``), and the engine calls the function with both halves of each. A
function of your own may interleave the halves as its model allows, as DualPipeV does with the all-to-alls of experts.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from megatron_pp.comm.events import EventPool
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.pairs.pair_instructions import PAIR
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import Cell, Task
from megatron_pp.runtime.engine.compute import Activation, each_tensor, in_one_block
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from megatron_pp.runtime.step_hooks import FeatureRun, StepHooks

Handlers = Mapping[str, Callable[[Task], None]]
Ready = Callable[[Activation], None]  # gets a result as soon as it exists
# ``forward_and_backward`` of ``Steps`` that can run a forward and another microbatch's backward as one. It gets a
# ForwardHalf, a BackwardHalf and two Ready, for the output and then for the input gradient. The last weight gradients,
# and on the last stage the loss, may come later. It returns what ``forward`` and ``backward`` return.
RunJointly = Callable[..., tuple[Activation, Activation]]


class ForwardHalf(NamedTuple):
    """The arguments of ``Steps.forward``."""

    chunk: int
    mb: int
    input_tensor: Activation


class BackwardHalf(NamedTuple):
    """The arguments of ``Steps.backward``."""

    chunk: int
    mb: int
    input_tensor: Activation
    output: Activation
    output_grad: Activation


def halves_of(pair: Task) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """The forward and the backward of ``pair``, each with its send if that goes out within the pair."""
    second = next(i for i, at in enumerate(pair.members) if at.op == ins.BACKWARD)
    return pair.members[:second], pair.members[second:]


@dataclass(eq=False)
class JointPair:
    """One PAIR that the model runs in one call, operation by operation (``RunJointly``), as Megatron's schedule plans
    do. While it runs, this object replaces the engine's ``steps``. The engine's own handlers of the two halves call it,
    and get the results of the one call in place of a computation.

    handlers    the engine's handlers, which observers see
    unobserved  the same handlers without observers. For observers the forward lasts until its output exists, and the
                backward from there to the end, with its send right behind it"""

    engine: Any  # PlanExecutor, whose ``steps`` this object is for a while
    handlers: Handlers
    unobserved: Handlers
    pair: Task
    jointly: RunJointly
    output: Activation = None
    running: Task | None = None

    def __post_init__(self) -> None:
        (self.of_forward, *self.output_sends), (self.of_backward, *self.grad_sends) = halves_of(self.pair)

    def run(self) -> None:
        engine = self.engine
        steps, engine.steps = engine.steps, self
        try:
            self._observe(self.of_forward)
            self.unobserved[ins.BACKWARD](self.of_backward)
        finally:
            engine.steps = steps
            self._observe(None)
        for at in self.grad_sends:
            self._observe(at)
            self._observe(None)

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
        """The whole pair, called for its backward."""
        at = self.of_forward
        forward = ForwardHalf(at.chunk, at.mb, self.engine.inputs.get(at.key))
        backward = BackwardHalf(chunk, mb, input_tensor, output, output_grad)
        self.output, grad = self.jointly(forward, backward, self.on_output, self.on_input_grad)
        self.unobserved[ins.FORWARD](at)  # on the last stage with the loss, which comes last
        return grad

    def on_output(self, output: Activation) -> None:
        """Called when the output exists; on the last stage it is the input of the loss."""
        if self.output_sends:
            self.output = output
            self.unobserved[ins.FORWARD](self.of_forward)
        self._observe(None)
        for at in self.output_sends:
            self.handlers[at.op](at)
        self._observe(self.of_backward)

    def on_input_grad(self, grad: Activation) -> None:
        """Called when the input gradient exists, before the last weight gradients do."""
        for at in self.grad_sends:
            self.engine.input_grads[at.key] = each_tensor(in_one_block, grad)
            self.unobserved[at.op](at)

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        """The result of the pair's forward."""
        output, self.output = self.output, None
        return output

    def _observe(self, at: Task | None) -> None:
        """Tell observers that the current operation has ended and that ``at`` begins."""
        observer = self.engine.observer
        over = self.running
        self.running = at
        if observer is not None and over is not None:
            observer.end(over.instruction)
        if observer is not None and at is not None:
            observer.begin(at.instruction)


@dataclass
class HalfCall:
    """One half of a pair. Calling it runs the half, from its input to its output; it must be called exactly once.

    chunk, microbatch  the half's; ``chunk`` counts this rank's model chunks
    model              the model chunk, in the wrapper in which it was given
    stream             the CUDA stream of the forward: the current one when it is called, unless the function has set
                       it before; found at the backward of that forward, which autograd runs there"""

    chunk: int
    microbatch: int
    model: Any
    run: Callable[[], None]
    called: bool = False
    stream: Any = None

    def __call__(self) -> None:
        if self.called:
            raise ScheduleInputError(
                f"overlapped_forward_backward ran chunk {self.chunk}, microbatch {self.microbatch} twice; each half is "
                "called once"
            )
        self.called = True
        if self.stream is None and torch.cuda.is_initialized():
            self.stream = torch.cuda.current_stream()
        self.run()


OverlappedForwardBackward = Callable[[HalfCall, HalfCall], Any]


def in_turn(forward_call: HalfCall, backward_call: HalfCall) -> None:
    """Run the forward, then the backward, as without pairs."""
    forward_call()
    backward_call()


def on_two_streams(forward_call: HalfCall, backward_call: HalfCall) -> None:
    """Run the halves on the current CUDA stream and another one; without a CUDA device, in turn. A backward runs on the
    stream of its forward. So the forward of this pair takes the stream that the backward's own forward did not use.

    Both streams wait for each other before and after, so that memory can go from one to the other. The other stream is
    the same for all pairs: torch has 32 of a priority, and the next one would be that of an NCCL communicator."""
    if not torch.cuda.is_available():
        in_turn(forward_call, backward_call)
        return
    current = torch.cuda.current_stream()
    side, events, _ = _streams(current.device)
    of_backward, forward_call.stream = (side, current) if backward_call.stream == side else (current, side)
    events.order(current, side)
    with torch.cuda.stream(forward_call.stream):
        forward_call()
    with torch.cuda.stream(of_backward):
        backward_call()
    events.order(side, current)


PAIR_FUNCTIONS: dict[str, OverlappedForwardBackward] = {"in_turn": in_turn, "on_two_streams": on_two_streams}
"""Name in a flag or a file -> function."""


class _Streams(NamedTuple):
    side: torch.cuda.Stream
    events: EventPool
    of_leaves: torch.cuda.Stream


_STREAMS = threading.local()  # device -> stream; each thread has its own, as it has its own current stream


def _streams(device: torch.device) -> _Streams:
    streams: dict[str, _Streams] = vars(_STREAMS)
    if str(device) not in streams:
        streams[str(device)] = _Streams(torch.cuda.Stream(device), EventPool(), torch.cuda.Stream(device))
    return streams[str(device)]


def _leaves_on_their_own_stream(models: Sequence[Any]) -> list[Any]:
    """The nodes that add gradients to ``models``' parameters, for the caller to keep. autograd runs such a node on the
    stream on which it was made (pytorch#137483). If that is a forward's stream, backwards on the other one wait for it.
    """
    if not torch.cuda.is_initialized():
        return []
    with torch.cuda.stream(_streams(torch.cuda.current_stream().device).of_leaves):
        return [
            get_gradient_edge(parameter).node
            for model in models
            for parameter in model.parameters()
            if parameter.requires_grad
        ]


def _run(handlers: Handlers, half: Sequence[Task]) -> None:
    for at in half:
        handlers[at.op](at)


@dataclass(eq=False)
class PairRunner:
    """Runs pairs by the user's ``function``, or as the model does, or in turn. ``models`` are the chunks of one rank,
    ``streams`` the streams of forwards whose backward has not run yet."""

    function: OverlappedForwardBackward | None
    models: Sequence[Any]
    streams: dict[Cell, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)

    def attach(self, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        self.engine: PlanExecutor = weakref.proxy(engine)
        self.leaves = [] if self.function is None else _leaves_on_their_own_stream(self.models)
        for op in ins.BACKWARD_OPS:
            handlers[op] = partial(self._alone, handlers[op])
        # The handlers are not kept here: they hold the engine, which holds this object.
        handlers[PAIR] = partial(self.run, self._noting_sends(handlers))

    def run(self, unobserved: Handlers, pair: Task) -> None:
        """``unobserved``: the engine's handlers, without an observer's."""
        handlers = self._noting_sends(self.engine.dispatch)
        jointly: RunJointly | None = getattr(self.engine.steps, "forward_and_backward", None)
        if self.function is not None:
            self._by_function(self.function, pair, handlers)
        elif jointly is not None:
            JointPair(self.engine, handlers, unobserved, pair, jointly).run()
        else:
            _run(handlers, pair.members)

    def _alone(self, handler: Handler, at: Task) -> None:
        """Run a backward outside of a pair on the stream of its forward, where autograd runs it. Its weight gradients
        are computed there too, or later: for a node that leaves them and gives no input gradient, autograd makes no
        stream wait."""
        stream = self.streams.pop(at.key, None)
        current = None if stream is None else torch.cuda.current_stream()
        if current is None or stream == current:
            handler(at)
            return
        events = _streams(current.device).events
        events.order(current, stream)
        with torch.cuda.stream(stream):
            handler(at)
        events.order(stream, current)

    def _noting_sends(self, handlers: Handlers) -> dict[str, Handler]:
        """``handlers``, such that those of sends are noted in the engine."""
        sends: dict[str, Handler] = {op: partial(self._send, handlers[op]) for op in ins.SEND_OPS}
        return {**handlers, **sends}

    def _send(self, handler: Handler, at: Task) -> None:
        self.engine.within = at.instruction
        try:
            handler(at)
        finally:
            self.engine.within = None

    def _by_function(self, function: OverlappedForwardBackward, pair: Task, handlers: Handlers) -> None:
        """Run the pair by ``function``. Raises ScheduleInputError if it did not call both halves."""
        forward_call, backward_call = (
            HalfCall(at.chunk, at.mb, self.models[at.chunk], partial(_run, handlers, half))
            for half in halves_of(pair)
            for at in half[:1]
        )
        of_forward, of_backward = (half[0].key for half in halves_of(pair))
        backward_call.stream = self.streams.pop(of_backward, None)
        function(forward_call, backward_call)
        self.streams[of_forward] = forward_call.stream
        left_out = [name for name, call in (("forward", forward_call), ("backward", backward_call)) if not call.called]
        if left_out:
            raise ScheduleInputError(
                f"overlapped_forward_backward returned without having called the {' and the '.join(left_out)}; it "
                "must call both halves once"
            )


class _Step(StepHooks):
    def runner(self, run: FeatureRun) -> PairRunner:
        return PairRunner(run.settings.overlapped_forward_backward, run.chunks)


STEP = _Step()

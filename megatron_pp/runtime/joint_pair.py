"""A pair that the model runs in one call, operation by operation (``JointSteps``), as Megatron's schedule plans do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_pp.plan import instruction as ins
from megatron_pp.plan.tasks import Key, Task
from megatron_pp.runtime.compute import Activation, BackwardHalf, ForwardHalf

Handlers = Mapping[str, Callable[[Task], None]]
RunJointly = Callable[..., tuple[Activation, Activation]]  # JointSteps.forward_and_backward


class Engine(Protocol):
    """What a pair needs of the engine."""

    steps: Any
    inputs: dict[Key, Activation]
    input_grads: dict[Key, Activation]
    observer: Any


@dataclass(eq=False)
class JointPair:
    """One PAIR that the engine has come to. While it runs, this object stands for the engine's ``steps``: the engine's
    own handlers of the two halves take what they give, and find in place of a computation what the one call has made.

    handlers    the engine's, which observers see
    unobserved  the same, which they do not: to them the forward lasts until its output is there, and the backward from
                there to the end, with its send right behind it
    """

    engine: Engine
    handlers: Handlers
    unobserved: Handlers
    pair: Task
    jointly: RunJointly
    output: Activation = None
    running: Task | None = None

    def __post_init__(self) -> None:
        (self.of_forward, *self.output_sends), (self.of_backward, *self.grad_sends) = self.pair.halves

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
        """The output is there; on the last stage, what the loss is made of."""
        if self.output_sends:
            self.output = output
            self.unobserved[ins.FORWARD](self.of_forward)
        self._observe(None)
        for at in self.output_sends:
            self.handlers[at.op](at)
        self._observe(self.of_backward)

    def on_input_grad(self, grad: Activation) -> None:
        """The input gradient is there, and the last weight gradients are not."""
        for at in self.grad_sends:
            self.engine.input_grads[at.key] = grad
            self.unobserved[at.op](at)

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        """What the pair's forward has returned."""
        output, self.output = self.output, None
        return output

    def _observe(self, at: Task | None) -> None:
        """What runs until now is over; from here on it is ``at``."""
        observer, over = self.engine.observer, self.running
        self.running = at
        if observer is not None and over is not None:
            observer.end(over.instruction)
        if observer is not None and at is not None:
            observer.begin(at.instruction)

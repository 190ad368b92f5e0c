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

    To observers the forward lasts until its output is there, and the backward from there to the end.
    """

    engine: Engine
    handlers: Handlers
    unobserved: Handlers
    pair: Task

    def run(self, jointly: RunJointly) -> None:
        engine, (self.of_forward, self.of_backward) = self.engine, self.pair.members
        self.jointly = jointly
        self.output: Activation = None
        self.running: Task | None = None
        steps, engine.steps = engine.steps, self
        try:
            self._observe(self.of_forward)
            self.unobserved[ins.BACKWARD](self.of_backward)
        finally:
            engine.steps = steps
            self._observe(None)

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
        """The whole pair, called for its backward."""
        at = self.of_forward
        forward = ForwardHalf(at.chunk, at.mb, self.engine.inputs.get(at.key))
        backward = BackwardHalf(chunk, mb, input_tensor, output, output_grad)
        self.output, grad = self.jointly(forward, backward)
        self.unobserved[ins.FORWARD](at)
        self._observe(self.of_backward)
        return grad

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

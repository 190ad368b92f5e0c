"""What runs a forward and another microbatch's backward as one, operation by operation."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from megatron_pp.runtime.compute import Activation

Ready = Callable[[Activation], None]  # is given a result as soon as it is there


class ForwardHalf(NamedTuple):
    """What ``Steps.forward`` is given."""

    chunk: int
    mb: int
    input_tensor: Activation


class BackwardHalf(NamedTuple):
    """What ``Steps.backward`` is given."""

    chunk: int
    mb: int
    input_tensor: Activation
    output: Activation
    output_grad: Activation


class JointSteps(Protocol):
    """Of ``Steps`` that can run a forward and another microbatch's backward as one, operation by operation."""

    def forward_and_backward(
        self, forward: ForwardHalf, backward: BackwardHalf, on_output: Ready | None, on_input_grad: Ready | None
    ) -> tuple[Activation, Activation]:
        """What ``forward`` and ``backward`` return. ``on_output``, then ``on_input_grad`` are called with the two as
        soon as they are there; the last weight gradients, and on the last stage the loss, may come after."""
        ...

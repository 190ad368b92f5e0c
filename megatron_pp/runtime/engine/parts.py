"""Protocols of the objects that the engine is given. For type checkers alone."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_pp.runtime.engine.compute import Activation


class Steps(Protocol):
    """The functions that the engine calls; ``chunk`` is the chunk's index on this rank, ``mb`` the microbatch."""

    def forward(self, chunk: int, mb: int, input_tensor: Activation) -> Activation:
        """Run the chunk; on the last stage return the scaled loss."""

    def backward(
        self, chunk: int, mb: int, input_tensor: Activation, output: Activation, output_grad: Activation
    ) -> Activation:
        """Run backward from what ``forward`` returned, or from its ``backward_root``. Returns the gradient of
        ``input_tensor``, or None if it has none."""

    def backward_root(self, output: Activation) -> Any:
        """The part of ``output`` that ``backward`` needs, without the data, which is freed after the send."""

"""Frees an output's memory while its graph is still needed.

Once a stage's output has been sent, only its place in the graph is needed. The engine keeps this place
(``backward_root``) and drops the tensor. The data is freed with the tensor, unless an operation of the same graph saved
it, a hook reads it, or the user holds it. Megatron-LM's deallocate_pipeline_outputs swaps the data under the tensor
(``swapped_outputs.py``). That takes the data away from these three too, and gradients are silently wrong.

Freeing an output while a send still reads it is the race of Megatron-LM#4047. The engine frees an output only after it
has waited for the send's handle, which owns the bytes.
"""

from typing import Any

import torch
from torch.autograd.graph import GradientEdge

_CustomFunction = torch._C._FunctionBase


class _OwningEdge(GradientEdge):
    """Keeps the graph alive by a node that no backward passes through. A backward must not pass it: the node belongs to
    the stream where the data was dropped, and the forward's stream would wait for that stream."""

    owner: Any


def backward_root(output: Any) -> Any:
    """Where the backward of ``output`` starts, without its data: a GradientEdge, None if it needs no gradient, a list
    for a list. A GradientEdge is returned as it is. Gradients must be enabled."""
    if not isinstance(output, torch.Tensor):
        if isinstance(output, GradientEdge):  # before the check for tuples: a GradientEdge is one
            return output
        return [backward_root(item) for item in output] if isinstance(output, (list, tuple)) else None
    if not output.requires_grad:
        return None
    node: Any = output.grad_fn
    if node is not None and not isinstance(node, _CustomFunction):
        return GradientEdge(node, output.output_nr)
    # The Python object of a leaf or a custom Function does not keep the graph alive; the node of a view does.
    view: Any = output.view_as(output).grad_fn
    if node is None:
        return GradientEdge(view, 0)
    edge = _OwningEdge(node, output.output_nr)  # type: ignore[arg-type]
    edge.owner = view
    return edge

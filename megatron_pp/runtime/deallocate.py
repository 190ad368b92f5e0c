"""Giving an output's memory back while its graph is still needed, and running backward through what is left of it.

Once a stage's output has been sent, only its place in the graph is of use. The engine keeps that (``backward_root``)
and drops the tensor. Its data goes with it, unless an operation of the same graph saved it, a hook reads it, or the
user holds it. Megatron-LM's deallocate_pipeline_outputs swaps the data under the tensor (``swapped_outputs.py``), which
takes it away from those as well: gradients are silently wrong.

Freeing an output while a send still reads it is the race of Megatron-LM#4047; the engine releases only after it has
waited on the send's handle, which owns the bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

Root = torch.Tensor | GradientEdge
_CustomFunction = torch._C._FunctionBase


class _OwningEdge(GradientEdge):
    """Keeps the graph alive by a node that backwards do not pass: it is of the stream where the data was dropped, for
    which the stream of the forward would wait."""

    owner: Any


def backward_root(output: Any) -> Any:
    """Where the backward of ``output`` starts, without its data: a GradientEdge, None where it needs no gradient, a
    list for a list; a GradientEdge is returned as it is. Gradients must be enabled."""
    if not isinstance(output, torch.Tensor):
        if isinstance(output, GradientEdge):  # which is a tuple, too
            return output
        return [backward_root(item) for item in output] if isinstance(output, (list, tuple)) else None
    if not output.requires_grad:
        return None
    node: Any = output.grad_fn
    if node is not None and not isinstance(node, _CustomFunction):
        return GradientEdge(node, output.output_nr)
    # Of a leaf and of a custom Function, the Python object does not keep the graph alive; a view's node does.
    view: Any = output.view_as(output).grad_fn
    if node is None:
        return GradientEdge(view, 0)
    edge = _OwningEdge(node, output.output_nr)  # type: ignore[arg-type]
    edge.owner = view
    return edge


def run_backward(roots: Sequence[Root], grads: Sequence[torch.Tensor | None]) -> None:
    """As ``accumulate``. Raises ValueError where a gradient is None and the output is not known to have one element."""
    filled = []
    for root, grad in zip(roots, grads, strict=True):
        if grad is None:
            if not isinstance(root, torch.Tensor) or root.numel() != 1:
                shape = f" of shape {tuple(root.shape)}" if isinstance(root, torch.Tensor) else ""
                raise ValueError(f"an output{shape} needs a gradient; only a scalar's may be left out")
            grad = torch.ones_like(root, memory_format=torch.preserve_format)
        filled.append(grad)
    accumulate(tuple(roots), tuple(filled))


def accumulate(roots: tuple[Root, ...], grads: tuple[torch.Tensor, ...]) -> None:
    """Backward from ``roots`` (outputs, deallocated or not, or edges) with ``grads``, accumulating into leaves.

    Calls what ``torch.autograd.backward`` calls, which insists that an output and its gradient have one shape; a
    deallocated output has not."""
    _engine_run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)

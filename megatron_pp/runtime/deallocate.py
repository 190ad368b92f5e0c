"""Frees an output's memory while its graph is still needed, and runs backward from what is left of the output.

Once a stage's output has been sent, only its place in the graph is needed. The engine keeps this place
(``backward_root``) and drops the tensor. The data is freed with the tensor, unless an operation of the same graph saved
it, a hook reads it, or the user holds it. Megatron-LM's deallocate_pipeline_outputs swaps the data under the tensor
(``swapped_outputs.py``). That takes the data away from these three too, and gradients are silently wrong.

Freeing an output while a send still reads it is the race of Megatron-LM#4047. The engine frees an output only after it
has waited for the send's handle, which owns the bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

Root = torch.Tensor | GradientEdge
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


def run_backward(roots: Sequence[Root], grads: Sequence[torch.Tensor | None]) -> None:
    """As ``accumulate``. Raises ValueError if a gradient is None and the output is not known to have one element."""
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

    Calls the engine below ``torch.autograd.backward``, because that function requires an output and its gradient to
    have the same shape, and a deallocated output has another one."""
    _engine_run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)

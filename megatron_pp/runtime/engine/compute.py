"""One microbatch through one model chunk: what the engine calls, and a backward with Megatron's semantics.

The engine calls a ``Steps`` object: ``ModelSteps`` (``model_steps.py``), or under the Megatron-core plug-in one that
calls Megatron's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward

Root = torch.Tensor | GradientEdge
Activation = Any  # a tensor, a list of tensors, or None at an end of the pipeline
Names = tuple[str, ...] | None  # of the tensors between stages; None if stages do not pass dicts


class Shapes(NamedTuple):
    """Shapes of what this rank receives and sends towards the last stage: one shape or a list of shapes each."""

    receive: Any
    send: Any


@dataclass
class LossRecord:
    """Results of the forwards of one step.

    data        what the loss function reported, in the order of the forwards (last stage only)
    num_tokens  tokens counted by 3-tuple loss functions: 0, or an integer tensor"""

    data: list[Any] = field(default_factory=list)
    num_tokens: Any = 0


def each_tensor(function: Callable[[torch.Tensor], Any], value: Activation) -> Activation:
    """``function`` of a tensor, or of each tensor in a list. Non-tensors pass through; the send rejects them."""
    if isinstance(value, (list, tuple)):
        return [each_tensor(function, item) for item in value]
    return function(value) if isinstance(value, torch.Tensor) else value


def in_one_block(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a contiguous copy at the same place in the graph, because a send needs contiguous memory. The copy
    is made here and not at the send: its launch may wait until the device is idle, and at the send it would wait for
    receives of the same boundary. A tensor without strides is returned as it is; the send rejects it."""
    return tensor.contiguous() if tensor.layout is torch.strided and not tensor.is_nested else tensor


def backward_under(timers: Any) -> Callable[..., Activation]:
    """``backward_through``, timed by Megatron's ``timers`` unless they are None."""
    return backward_through if timers is None else partial(_timed_backward, timers)


def _timed_backward(timers: Any, *given: Any) -> Activation:
    timers("backward-compute", log_level=2).start()
    grad = backward_through(*given)
    timers("backward-compute").stop()
    return grad


def backward_through(
    input_tensor: Activation, output: Activation, output_grad: Activation, grad_scale_func: Callable[[Any], Any] | None
) -> Activation:
    """Run backward from ``output`` (a tensor, possibly deallocated, its ``backward_root``, or a list of them) and
    return the gradient(s) of ``input_tensor``.

    On the last stage ``output_grad`` is None, and the loss is first scaled by ``grad_scale_func``. Outputs that need no
    gradient are skipped; if ``output`` is None, all are. An input that received no gradient gives None."""
    lists = isinstance(input_tensor, (list, tuple)) or isinstance(output_grad, (list, tuple))
    is_edge = isinstance(output, GradientEdge)
    if (is_edge or isinstance(output, torch.Tensor)) and not lists:  # the hot path
        if output_grad is None:
            loss = output if grad_scale_func is None else grad_scale_func(output)
            if loss.requires_grad:
                run_backward((loss,), (None,))
        elif is_edge or output.requires_grad:
            accumulate((output,), (output_grad,))
        return None if input_tensor is None else input_tensor.grad
    if output is not None:
        from megatron_pp.runtime.engine.several_outputs import roots_and_grads

        roots, grads = roots_and_grads(output, output_grad, grad_scale_func)
        if roots:
            run_backward(roots, grads)
    return each_tensor(attrgetter("grad"), input_tensor)


def run_backward(roots: Sequence[Root], grads: Sequence[torch.Tensor | None]) -> None:
    """Like ``accumulate``. Raises ValueError if a gradient is None and the output is not known to have one element."""
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

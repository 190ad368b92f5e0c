"""The begin of the backward of a stage that gives several tensors, or none."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge


def roots_and_grads(
    output: Any, output_grad: Any, grad_scale_func: Callable[[Any], Any] | None
) -> tuple[list[Any], list[Any]]:
    """The tensors of ``output`` that need gradients, and their gradients from ``output_grad``; see
    ``compute.backward_through``."""
    outputs = list(output) if isinstance(output, (list, tuple)) and not isinstance(output, GradientEdge) else [output]
    grads = list(output_grad) if isinstance(output_grad, (list, tuple)) else [output_grad] * len(outputs)
    if grads[0] is None and grad_scale_func is not None:
        outputs[0] = grad_scale_func(outputs[0])
    needed = [
        (o, g)
        for o, g in zip(outputs, grads, strict=True)
        if isinstance(o, GradientEdge) or (isinstance(o, torch.Tensor) and o.requires_grad)
    ]
    return [o for o, _ in needed], [g for _, g in needed]

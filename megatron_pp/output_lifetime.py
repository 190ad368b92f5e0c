"""Giving an output's memory back while its graph is still needed, and running backward through what is left of it.

Once a stage's output has been sent, only its ``grad_fn`` is of use. Swapping its storage for one element frees the
activation without touching the graph (Megatron-LM's deallocate_pipeline_outputs). Freeing it while a send still reads
it is the race of Megatron-LM#4047; the engine releases only after it has waited on the send's handle, and the handle
owns the bytes besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import Variable


def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Replace the data of ``out`` by a single element of the same dtype on the same device, keeping its graph.

    ``out`` is a tensor of any shape and dtype, a list, tuple or dict of such (each is deallocated), or None (nothing
    happens). Views are accepted. Nothing happens unless ``deallocate_pipeline_outputs``. Raises TypeError for
    anything else.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    if isinstance(out, torch.Tensor):
        out.data = _one_element(out.dtype, out.device)
    elif isinstance(out, (list, tuple)):
        for item in out:
            deallocate_output_tensor(item, True)
    elif isinstance(out, dict):
        for item in out.values():
            deallocate_output_tensor(item, True)
    else:
        raise TypeError(
            f"deallocate_output_tensor takes a tensor or a list, tuple or dict of tensors, not {type(out).__name__}"
        )


@lru_cache(maxsize=64)
def _one_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What stands in for deallocated data; never read, so all outputs of a kind may share it."""
    return torch.empty((1,), device=device, dtype=dtype)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Backward through one output that may have been deallocated: see ``run_backward``.

    ``grad_output`` has the shape that ``output`` had; None stands for 1 and needs an output of one element.
    """
    run_backward([output], [grad_output])


def run_backward(outputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    """Backward from ``outputs`` with ``grads``, accumulating into leaves.

    Calls the autograd engine itself: ``torch.autograd.backward`` insists that an output and its gradient have one
    shape, which a deallocated output has not. Raises ValueError where a gradient is None and the output has more than
    one element.
    """
    filled = []
    for output, grad in zip(outputs, grads, strict=True):
        if grad is None:
            if output.numel() != 1:
                raise ValueError(
                    f"an output of shape {tuple(output.shape)} needs a gradient; only a scalar's may be left out"
                )
            grad = torch.ones_like(output, memory_format=torch.preserve_format)
        filled.append(grad)
    accumulate(tuple(outputs), tuple(filled))


def accumulate(outputs: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...]) -> None:
    """As ``run_backward``, where every output has a gradient."""
    Variable._execution_engine.run_backward(
        outputs, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Own(torch.autograd.Function):
    """The same bytes, one step on in the graph, as a tensor of its own: neither a view nor a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty((1,), device=tensor.device, dtype=tensor.dtype)
        out.data = tensor.data
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def viewless(output: Any) -> Any:
    """``output`` itself, or, where deallocating it would do harm or no good, another tensor with its bytes and graph.

    A view holds its base, and the base the whole storage: deallocating the view alone would give nothing back
    (Megatron-LM#6483). A leaf is not the stage's work: it is what the stage was given (a stage without layers), a
    parameter or a tensor of the user's, and must keep its data. What is no tensor is returned as it is.
    """
    if not isinstance(output, torch.Tensor):
        return output
    if output.is_leaf and not output.requires_grad:
        return output.detach()
    return _Own.apply(output) if output.is_leaf or output._base is not None else output

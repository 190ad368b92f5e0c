"""Outputs whose data has been given back, for Megatron's `backward_step`.

It asks an output whether it needs a gradient, and passes it on to its module's `custom_backward`, which wants a tensor
of one element. An alias of the output with one element costs a microbatch a third of all that happens outside
the model: a tensor, and a node of the graph. So outputs are kept as places in the graph, and `custom_backward` is
replaced by one that takes these too.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from megatron_pp.runtime.deallocate import accumulate, backward_root


class FreedOutput:
    """Where the backward of an output starts. `root` is None where the output needs no gradient."""

    __slots__ = ("requires_grad", "root")

    def __init__(self, output: torch.Tensor) -> None:
        self.root: Any = backward_root(output)
        self.requires_grad = self.root is not None


def freed_output(output: Any) -> Any:
    """`output` without its data; a list for a list; what is no tensor is returned as it is."""
    if isinstance(output, torch.Tensor):
        return FreedOutput(output)
    return [freed_output(item) for item in output] if isinstance(output, (list, tuple)) else output


def take_freed_outputs(schedules: ModuleType) -> None:
    """Replace `schedules.custom_backward`, unless it is replaced."""
    theirs = schedules.custom_backward
    if hasattr(theirs, "megatron_own"):
        return

    @functools.wraps(theirs)
    def custom_backward(output: Any, grad_output: torch.Tensor | None) -> None:
        if isinstance(output, FreedOutput) and grad_output is not None:
            accumulate((output.root,), (grad_output,))
        else:
            theirs(output, grad_output)

    custom_backward.megatron_own = theirs  # type: ignore[attr-defined]
    schedules.custom_backward = custom_backward  # type: ignore[attr-defined]


def leave_freed_outputs(schedules: ModuleType) -> None:
    """Restore Megatron's own `custom_backward`."""
    theirs = getattr(getattr(schedules, "custom_backward", None), "megatron_own", None)
    if theirs is not None:
        schedules.custom_backward = theirs  # type: ignore[attr-defined]

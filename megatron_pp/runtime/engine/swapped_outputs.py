"""Megatron-LM's ways with a sent output, under its names, for callers who know that nothing else holds it. The engine
uses neither (``deallocate.py``).
"""

from functools import lru_cache
from typing import Any

import torch

from megatron_pp.runtime.engine.compute import run_backward


def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Replace the data of ``out`` by a single element of the same dtype on the same device, keeping its graph.

    ``out`` is a tensor of any shape and dtype, views included, a list, tuple or dict of such, or None (nothing
    happens). Nothing happens unless ``deallocate_pipeline_outputs``. Raises TypeError for anything else.

    Megatron-LM's function, for callers who know that nothing else holds ``out``: an operation that saved it, or a hook
    that reads it, finds the one element. The engine uses ``backward_root`` instead."""
    if out is None or not deallocate_pipeline_outputs:
        return
    if isinstance(out, torch.Tensor):
        out.data = _one_element(out.dtype, out.device)
    elif isinstance(out, (list, tuple, dict)):
        for item in out.values() if isinstance(out, dict) else out:
            deallocate_output_tensor(item, True)
    else:
        raise TypeError(
            f"deallocate_output_tensor takes a tensor or a list, tuple or dict of tensors, not {type(out).__name__}"
        )


@lru_cache(maxsize=64)
def _one_element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In place of deallocated data; never read, so all outputs of a kind share it."""
    return torch.empty((1,), device=device, dtype=dtype)


def custom_backward(output: torch.Tensor, grad_output: torch.Tensor | None) -> None:
    """Megatron's function of this name: ``run_backward`` of one output, which may have been deallocated.

    ``grad_output`` has the shape that ``output`` had; None means 1 and needs an output of one element."""
    run_backward([output], [grad_output])

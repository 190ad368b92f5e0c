"""Shapes of messages for releases of Megatron-core whose `get_tensor_shapes` takes the side of a stage. With
hyper-connections messages between stages are wider than the tensors at the ends of the pipeline. With Attention
Residuals messages grow from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_pp.integrations.megatron.steps.served.scope import has_attention_residuals
from megatron_pp.runtime.arguments import StepInputs, pipeline_group


def shapes_of_sides(
    inputs: StepInputs, alone: bool, config: Any, ask: Callable[..., list[Any]]
) -> tuple[list[Any], list[Any]]:
    """The shapes that this rank receives and sends. With several chunks on each rank all messages have one shape.
    ``ask``: Megatron's `get_tensor_shapes` for a config and a side."""
    group = pipeline_group(inputs, alone)
    if not inputs.chunked:
        return ask(config, pp_group=group, is_recv=True), ask(config, pp_group=group, is_recv=False)
    inner = group is not None and group.rank() > 0  # the side of this rank's only chunk on which another stage is
    if has_attention_residuals(config):
        from megatron_pp.integrations.megatron.steps import attention_residuals

        shapes = attention_residuals.between_chunks(ask, config, {"pp_group": group, "is_recv": inner})
    else:
        shapes = ask(config, pp_group=group, is_recv=inner)
    return shapes, list(shapes)

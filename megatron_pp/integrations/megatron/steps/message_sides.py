"""Shapes of messages under releases of Megatron-core whose `get_tensor_shapes` takes the side of a stage: with
hyper-connections what a stage gives the next one is wider than what enters and leaves the pipeline, and with Attention
Residuals messages grow from stage to stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_pp.integrations.megatron.steps.scope import has_attention_residuals
from megatron_pp.runtime.communicators import pipeline_group

if TYPE_CHECKING:
    from megatron_pp.integrations.megatron.steps.call import MegatronHost


def shapes_of_sides(host: MegatronHost) -> tuple[list[Any], list[Any]]:
    """What this rank receives and what it sends. With several chunks a rank all messages have one shape."""
    group = pipeline_group(host.inputs, host.alone)
    config = host.overridden_config
    if not host.inputs.chunked:
        return host.ask(config, pp_group=group, is_recv=True), host.ask(config, pp_group=group, is_recv=False)
    inner = group is not None and group.rank() > 0  # the side of this rank's only chunk on which another stage is
    if has_attention_residuals(config):
        from megatron_pp.integrations.megatron.steps import attention_residuals

        shapes = attention_residuals.between_chunks(host, {"pp_group": group, "is_recv": inner})
    else:
        shapes = host.ask(config, pp_group=group, is_recv=inner)
    return shapes, list(shapes)

"""Resets that Megatron-core's schedules do before and after a step, for settings that few models have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.releases.versions import AFTER_TRAINING, NEVER
from megatron_pp.integrations.megatron.steps import attention_residuals
from megatron_pp.integrations.megatron.steps.served.scope import has_attention_residuals
from megatron_pp.runtime.arguments import StepInputs


def before_step(megatron: Megatron, config: Any, forward_only: bool) -> None:
    """Reset the paged stash and the sums of Attention Residuals, as far as the model has them."""
    reset_paged_stash(megatron, config, forward_only)
    if has_attention_residuals(config):
        attention_residuals.forget_sums()


def after_step(megatron: Megatron, inputs: StepInputs, evaluated_alone: bool) -> None:
    """Reset the activation offload, and gather parameters again after an evaluation without a pipeline."""
    reset_offload(megatron, inputs.config, inputs.forward_only, inputs.pg_collection)
    if evaluated_alone:
        resynchronise_fsdp(megatron, inputs.chunks)


def reset_offload(megatron: Megatron, config: Any, forward_only: bool, groups: Any) -> None:
    """Reset the fine-grained activation offload of this step, if the release does (Megatron-LM#3739)."""
    when = megatron.row.offload_reset
    if when == NEVER or (when == AFTER_TRAINING and forward_only):
        return
    if getattr(config, "fine_grained_activation_offloading", False):
        reset = getattr(megatron.schedules, "_reset_activation_offload", None)
        if reset is not None:
            reset(groups)
        else:
            megatron.schedules.off_interface.reset()


def reset_paged_stash(megatron: Megatron, config: Any, forward_only: bool) -> None:
    """Reset the paged stash of MoE activations, if the release has it."""
    reset = getattr(megatron.schedules, "paged_stash_reset", None)
    if reset is not None and getattr(config, "moe_paged_stash", False):
        reset(enabled=not forward_only, config=config)


def resynchronise_fsdp(megatron: Megatron, chunks: Sequence[Any]) -> None:
    """Synchronise Megatron-FSDP's parameter gathering, if the release does."""
    for chunk in chunks if megatron.row.fsdp_resync else ():
        ddp = getattr(chunk, "ddp_config", None)
        if ddp is not None and ddp.use_megatron_fsdp and ddp.overlap_param_gather:
            chunk.synchronize_param_gather()

"""The host of the library's own loop: it runs the microbatches, and what follows the last backward of a step."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from megatron_pp.config.settings import StepSettings
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.runtime.engine.model_steps import ModelSteps, StepOptions
from megatron_pp.runtime.host import Host
from megatron_pp.runtime.step import Step
from megatron_pp.runtime.step_features import hooks_of


class OwnHost(Host):
    """The host of one call of the library's own schedule functions."""

    keeps_calls = True

    def steps(self, step: Step, plan: Plan) -> Any:
        return made_steps(kind_of_steps(plan) if step.of_rank.has_features else ModelSteps, step)

    def finish(self, step: Step, steps: Any) -> None:
        inputs, tokens, device = self.inputs, steps.record.num_tokens, step.communicator.device
        if not inputs.forward_only:
            more = inputs.pg_collection, inputs.force_all_reduce
            finalize_gradients(step.settings, inputs.chunks, tokens, device, *more)
        self.stop_timer(step)


def made_steps(kind: Any, step: Step) -> Any:
    """The ``ModelSteps`` of ``step``, of this class."""
    inputs = step.inputs
    whole_sequence = None
    if step.cp_size > 1 and not inputs.forward_only and not step.settings.calculate_per_token_loss:
        from megatron_pp.runtime.engine.context_parallel_loss import WholeSequence

        whole_sequence = WholeSequence(inputs.pg_collection, step.cp_size)
    options = StepOptions(
        num_microbatches=inputs.num_microbatches,
        is_last_stage=step.of_rank.is_last_stage,
        device_type=step.communicator.device.type,
        cp_size=step.cp_size,
        forward_only=inputs.forward_only,
        collect_non_loss_data=inputs.collect_non_loss_data,
        first_val_step=inputs.first_val_step,
        checkpoint_flags=step.of_rank.checkpoint_flags,
        whole_sequence=whole_sequence,
    )
    return kind(inputs.forward_step_func, inputs.data_iterators, inputs.chunks, step.settings, options)


def kind_of_steps(plan: Plan) -> type[ModelSteps]:
    """The class that runs a microbatch through a chunk."""
    for hooks in hooks_of(plan):
        found = hooks.steps()
        if found is not None:
            return found
    return ModelSteps


def finalize_gradients(
    settings: StepSettings,
    chunks: Sequence[Any],
    num_tokens: Any,
    device: torch.device,
    pg_collection: Any,
    force_all_reduce: bool,
) -> None:
    """Called after the last instruction. Finishes the embedding's deferred weight gradients, then calls
    ``config.finalize_model_grads_func`` with the keywords that it takes (Megatron's order, Megatron-LM#1012)."""
    if settings.defer_embedding_wgrad_compute:
        from megatron_pp.runtime.deferred_embedding import finish_embedding

        finish_embedding(chunks)
    finalize = settings.finalize_model_grads_func
    if finalize is None:
        return
    tokens = None
    if settings.calculate_per_token_loss:
        tokens = torch.as_tensor(num_tokens, dtype=torch.int, device=device)
    known = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    accepted = _keywords_of(finalize)
    finalize(list(chunks), tokens, **{k: v for k, v in known.items() if accepted is None or k in accepted})


def _keywords_of(function: Any) -> frozenset[str] | None:
    """The keyword names that ``function`` takes; None if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)

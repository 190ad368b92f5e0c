"""The end of a training step: deferred embedding gradients, then Megatron's ``finalize_model_grads_func``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.module_attributes import wrapped_attribute


def finalize_gradients(
    settings: StepSettings,
    chunks: Sequence[Any],
    num_tokens: Any,
    device: torch.device,
    pg_collection: Any,
    force_all_reduce: bool,
) -> None:
    """Finish deferred weight gradients of the embedding, then call the config's function as this version of it expects.

    The order is Megatron's: deferred weight gradients, then data-parallel reduction, then the embedding's
    (Megatron-LM#1012).
    """
    if settings.defer_embedding_wgrad_compute:
        _finish_embedding(chunks)
    finalize = settings.finalize_model_grads_func
    if finalize is None:
        return
    tokens = None
    if settings.calculate_per_token_loss:
        tokens = torch.as_tensor(num_tokens, dtype=torch.int, device=device)
    known = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    accepted = _keywords_of(finalize)
    finalize(list(chunks), tokens, **{k: v for k, v in known.items() if accepted is None or k in accepted})


def _finish_embedding(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        finish = wrapped_attribute(chunk, "finish_embedding_wgrad_compute")
        if finish is not None:
            finish()
            return
    if any(wrapped_attribute(chunk, "post_process", False) for chunk in chunks):
        raise ScheduleInputError(
            "config.defer_embedding_wgrad_compute is set, but no model chunk of the last stage has "
            "finish_embedding_wgrad_compute(); unset the field"
        )


@lru_cache(maxsize=32)
def _keywords_of(function: Any) -> frozenset[str] | None:
    """The keyword names that ``function`` takes; None for any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)

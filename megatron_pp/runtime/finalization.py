"""What follows the last backward of a step in the library's own loop. Under Megatron its schedules' calls do."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from megatron_pp.config.settings import StepSettings


def finalize_gradients(
    settings: StepSettings,
    chunks: Sequence[Any],
    num_tokens: Any,
    device: torch.device,
    pg_collection: Any,
    force_all_reduce: bool,
) -> None:
    """After the last instruction: finish the embedding's deferred weight gradients, then call
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
    """The keyword names that ``function`` takes; None for any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)

"""Steps of Megatron-core's models with Attention Residuals, where stages pass on the sums of earlier blocks of layers.

The draft Megatron-LM#6840 of September 2026 has them. Without virtual stages its `get_tensor_shapes` gives the shape of
each message. With virtual stages a rank keeps the block sums that it has seen in a cache of the process, and a message
has only the other sums. All messages then have the width of the widest message between any two stages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.megatron.overridden import with_overrides
from megatron_pp.integrations.megatron.releases.versions import ENTRIES

FIELD = "enable_attention_residuals"
_MODULE = "megatron.core.transformer.attention_residual"
_WIDTH = "attn_res_uniform_payload_slices"
_RESET = "attn_res_source_cache_reset"


def _of_release() -> ModuleType | None:
    """The release's module for Attention Residuals; None if it has none."""
    try:
        return importlib.import_module(_MODULE)
    except ImportError:
        return None


def reason_not_served(schedule: str) -> str | None:
    """Why Megatron's own ``schedule`` runs such a step; None if the engine runs it."""
    if schedule != ENTRIES[2] or hasattr(_of_release(), _WIDTH):
        return None
    return f"Attention Residuals with virtual stages as this release has them (no {_MODULE}.{_WIDTH})"


def refuse_v(schedule: str) -> None:
    """Raises ScheduleInputError because ``schedule`` places stages in a V."""
    raise ScheduleInputError(
        f"config.pipeline_schedule {schedule!r} places stages in a v, and config.{FIELD} is on: Megatron's layers keep "
        "on each rank the block sums of the stages that a loop places there, and a v places others; choose a "
        "pipeline_schedule whose stages are in a loop"
    )


def between_chunks(ask: Callable[..., list[Any]], config: Any, side: dict[str, Any]) -> list[Any]:
    """The shapes of messages between stages with several chunks on each rank: those of a model without such residuals,
    which `get_tensor_shapes` gives for ``side``, times the number of sums in the widest message."""
    slices = getattr(_of_release(), _WIDTH)(config)
    plain = ask(with_overrides(config, {FIELD: False}), **side)
    return [(slices * shape[0], *shape[1:]) for shape in plain]


def forget_sums() -> None:
    """Empty the cache of this process, which a step that failed may have left filled."""
    reset = getattr(_of_release(), _RESET, None)
    if reset is not None:
        reset()

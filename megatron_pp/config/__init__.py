"""The configuration that the schedules read: Megatron's field names, and ours. Its names are loaded when they are first
asked for, so that the parts without torch can be used without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_pp.errors import ConfigError, LayoutError, MicrobatchCountError, ScheduleError, WorldSizeError

if TYPE_CHECKING:
    from megatron_pp.config.layout import place_layers
    from megatron_pp.config.microbatch_counts import MicrobatchCount, explain_microbatch_count, legal_microbatch_counts
    from megatron_pp.config.model_config import ModelParallelConfig, TransformerConfig

_EXPORTS = {
    "MicrobatchCount": "microbatch_counts",
    "ModelParallelConfig": "model_config",
    "TransformerConfig": "model_config",
    "explain_microbatch_count": "microbatch_counts",
    "legal_microbatch_counts": "microbatch_counts",
    "place_layers": "layout",
}

__all__ = [
    "ConfigError", "LayoutError", "MicrobatchCount", "MicrobatchCountError", "ModelParallelConfig", "ScheduleError",
    "TransformerConfig", "WorldSizeError", "explain_microbatch_count", "legal_microbatch_counts", "place_layers",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)

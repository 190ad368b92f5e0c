"""The configuration that the schedules read: Megatron's field names, and ours. Its names are loaded when they are first
asked for, so that the parts without torch can be used without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_pp.config.model_config import (
        ConfigError,
        LayoutError,
        MicrobatchCount,
        MicrobatchCountError,
        ModelParallelConfig,
        ScheduleError,
        TransformerConfig,
        WorldSizeError,
        explain_microbatch_count,
        legal_microbatch_counts,
        place_layers,
    )

__all__ = [
    "ConfigError",
    "LayoutError",
    "MicrobatchCount",
    "MicrobatchCountError",
    "ModelParallelConfig",
    "ScheduleError",
    "TransformerConfig",
    "WorldSizeError",
    "explain_microbatch_count",
    "legal_microbatch_counts",
    "place_layers",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron_pp.config.model_config"), name)

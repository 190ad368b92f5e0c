"""The configuration that the schedules read: Megatron's field names, and ours. Its names are loaded when they are first
asked for, so that the parts without torch can be used without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_pp.config.model_config import (
        ConfigError as ConfigError,
    )
    from megatron_pp.config.model_config import (
        LayoutError as LayoutError,
    )
    from megatron_pp.config.model_config import (
        MicrobatchCount as MicrobatchCount,
    )
    from megatron_pp.config.model_config import (
        MicrobatchCountError as MicrobatchCountError,
    )
    from megatron_pp.config.model_config import (
        ModelParallelConfig as ModelParallelConfig,
    )
    from megatron_pp.config.model_config import (
        ScheduleError as ScheduleError,
    )
    from megatron_pp.config.model_config import (
        TransformerConfig as TransformerConfig,
    )
    from megatron_pp.config.model_config import (
        WorldSizeError as WorldSizeError,
    )
    from megatron_pp.config.model_config import (
        explain_microbatch_count as explain_microbatch_count,
    )
    from megatron_pp.config.model_config import (
        legal_microbatch_counts as legal_microbatch_counts,
    )
    from megatron_pp.config.model_config import (
        option as option,
    )
    from megatron_pp.config.model_config import (
        place_layers as place_layers,
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
    "option",
    "place_layers",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("megatron_pp.config.model_config"), name)

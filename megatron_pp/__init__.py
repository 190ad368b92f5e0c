"""Pipeline-parallel schedules for Megatron-style training.

Importing this package is cheap and does not import torch: `megatron_pp.plan` can be used on a machine without it.
The names below are loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron_pp.config.model_config import ConfigError as ConfigError
    from megatron_pp.config.model_config import ModelParallelConfig as ModelParallelConfig
    from megatron_pp.config.model_config import TransformerConfig as TransformerConfig
    from megatron_pp.p2p_communication import P2PCommunicator as P2PCommunicator
    from megatron_pp.runtime.stage import PipelineStage as PipelineStage
    from megatron_pp.schedules import get_forward_backward_func as get_forward_backward_func

_EXPORTS = {
    "ConfigError": "megatron_pp.config.model_config",
    "ModelParallelConfig": "megatron_pp.config.model_config",
    "TransformerConfig": "megatron_pp.config.model_config",
    "P2PCommunicator": "megatron_pp.p2p_communication",
    "PipelineStage": "megatron_pp.runtime.stage",
    "get_forward_backward_func": "megatron_pp.schedules",
}

__all__ = [
    "ConfigError",
    "ModelParallelConfig",
    "P2PCommunicator",
    "PipelineStage",
    "TransformerConfig",
    "__version__",
    "get_forward_backward_func",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

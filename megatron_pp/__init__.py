"""Pipeline-parallel schedules for Megatron-style training.

Importing this package is cheap and does not import torch: ``megatron_pp.plan`` can be used on a machine without it.
Other names, modules among them, are loaded when they are first used.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from megatron_pp import errors, plan
from megatron_pp.errors import *  # noqa: F403

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron_pp.config.model_config import ModelParallelConfig, TransformerConfig
    from megatron_pp.features.output_layer.output_runner import SplitOutputLayer
    from megatron_pp.features.slices.sequence_slice import sequence_slice
    from megatron_pp.p2p_communication import P2PCommunicator
    from megatron_pp.plan.builder import build_plan, stage_numbers
    from megatron_pp.plan.simulate.simulator import simulate
    from megatron_pp.plan.verify.verifier import verify
    from megatron_pp.runtime.engine.swapped_outputs import deallocate_output_tensor
    from megatron_pp.runtime.footprint import measure_footprint
    from megatron_pp.runtime.stage import PipelineStage
    from megatron_pp.schedules import get_forward_backward_func
    from megatron_pp.weight_grad.convert import split_weight_grad

_EXPORTS = {
    "ModelParallelConfig": "config.model_config",
    "P2PCommunicator": "p2p_communication",
    "PipelineStage": "runtime.stage",
    "SplitOutputLayer": "features.output_layer.output_runner",
    "TransformerConfig": "config.model_config",
    "build_plan": "plan.builder",
    "deallocate_output_tensor": "runtime.engine.swapped_outputs",
    "get_forward_backward_func": "schedules",
    "measure_footprint": "runtime.footprint",
    "sequence_slice": "features.slices.sequence_slice",
    "simulate": "plan.simulate.simulator",
    "split_weight_grad": "weight_grad.convert",
    "stage_numbers": "plan.builder",
    "verify": "plan.verify.verifier",
}

__all__ = [
    "ModelParallelConfig", "P2PCommunicator", "PipelineStage", "SplitOutputLayer", "TransformerConfig",
    "__version__", "build_plan", "deallocate_output_tensor", "get_forward_backward_func", "measure_footprint",
    "plan", "sequence_slice", "simulate", "split_weight_grad", "stage_numbers", "verify",
]  # fmt: skip
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Loads modules of a layer above by name, if a setting or a plan needs them.

A module of a layer below is imported within the function that needs it. Imports go one way, so a module of a layer
above, in the same folder or in another, is loaded here by name. The caller states its type.
"""

import importlib
import sys
from typing import Any

MODULES = {
    # Settings of a step.
    "measure": "megatron_pp.features.measuring.measuring",
    "metrics": "megatron_pp.features.measuring.metrics",
    "megatron_scalars": "megatron_pp.integrations.megatron.steps.tensorboard",
    "microbatch_costs": "megatron_pp.features.packing.step_plans",
    "p2p_debug": "megatron_pp.features.p2p_debug.send_buffer_check",
    "wire_check": "megatron_pp.features.p2p_debug.wire_check",
    "shapes_ahead": "megatron_pp.comm.shapes_ahead",
    "batches": "megatron_pp.comm.batches",
    "modules_file": "megatron_pp.features.modules.modules_file",
    "schedule_file": "megatron_pp.plan.io.schedule_file",
    "instruction_text": "megatron_pp.plan.ir.instruction_text",
    "prediction": "megatron_pp.planner.compare",
    "named_tensors": "megatron_pp.features.named_tensors.named_steps",
    "v_placement": "megatron_pp.integrations.megatron.steps.v_placement",
    "megatron_order": "megatron_pp.integrations.megatron.graph_order",
}


def path_of(name: str) -> str:
    """The path of the module of this name in MODULES, or of a module of a feature, which has its folder in its name."""
    return f"megatron_pp.features.{name}" if "." in name else MODULES[name]


def load(name: str) -> Any:
    """The module of this name, as in ``path_of``."""
    return importlib.import_module(path_of(name))


def is_loaded(module: str) -> bool:
    """Whether the program uses ``module`` already: a model of its classes has loaded it."""
    return module in sys.modules

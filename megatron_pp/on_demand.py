"""What a step loads only where a setting, a plan or a failure asks for it.

A module that a default step loads imports none of these: it asks here, by name.
"""

import importlib
import sys
from typing import Any

from megatron_pp.feature_table import module_names

MODULES = {
    # Settings of a step.
    "measure": "megatron_pp.features.measuring.measuring",
    "microbatch_costs": "megatron_pp.features.packing.step_plans",
    "trace_dir": "megatron_pp.tracing.recorder",
    "p2p_debug": "megatron_pp.features.p2p_debug.send_buffer_check",
    "wire_check": "megatron_pp.features.p2p_debug.wire_check",
    "pipeline_measured": "megatron_pp.plan.costs.measured",
    "modules_file": "megatron_pp.features.modules.modules_file",
    "schedule_file": "megatron_pp.plan.io.schedule_file",
    "torch": "torch",
    "prediction": "megatron_pp.planner.compare",
    "model_steps": "megatron_pp.runtime.model_steps",
    "alone": "megatron_pp.runtime.alone",
    "step_hooks": "megatron_pp.runtime.step_hooks",
    "partial_checkpoints": "megatron_pp.runtime.partial_checkpoints",
    "shared_iterators": "megatron_pp.runtime.shared_iterators",
    "deferred_embedding": "megatron_pp.runtime.deferred_embedding",
    "named_tensors": "megatron_pp.features.named_tensors.named_steps",
    "context_parallel_loss": "megatron_pp.runtime.context_parallel_loss",
    "megatron_order": "megatron_pp.integrations.megatron.graph_order",
    "conversions": "megatron_pp.config.conversions",
    "made": "megatron_pp.config.made",
    "layout": "megatron_pp.config.layout",
    "layout_text": "megatron_pp.config.layout_text",
    "weight_grad": "megatron_pp.weight_grad",
    # What the device or the backend asks for.
    "p2p_communicator": "megatron_pp.comm.p2p_communicator",
    "shapes_ahead": "megatron_pp.comm.shapes_ahead",
    "gloo_transport": "megatron_pp.comm.gloo.gloo_transport",
    "nccl_transport": "megatron_pp.comm.nccl.nccl_transport",
    "collectives": "megatron_pp.comm.collectives",
    "queue_advice": "megatron_pp.runtime.queue_advice",
    "device_events": "megatron_pp.faults.device_events",
    "nccl_settings": "megatron_pp.faults.nccl_settings",
    # What a plan has, or has instructions of.
    "causes": "megatron_pp.plan.lower.causes",
    # Steps of Megatron-core's.
    "megatron_reads": "megatron_pp.integrations.megatron.releases.reads",
    "megatron_losses": "megatron_pp.integrations.megatron.steps.losses",
    "combined": "megatron_pp.integrations.megatron.steps.combined",
    "megatron_modules": "megatron_pp.integrations.megatron.steps.modules",
    "message_sides": "megatron_pp.integrations.megatron.steps.message_sides",
    "attention_residuals": "megatron_pp.integrations.megatron.steps.attention_residuals",
    "other_schedules": "megatron_pp.integrations.megatron.releases.other_schedules",
    "v_placement": "megatron_pp.integrations.megatron.steps.v_placement",
    "v_logs": "megatron_pp.integrations.megatron.steps.v_logs",
    "layer_order": "megatron_pp.faults.layer_order",
    "layer_numbers": "megatron_pp.runtime.layer_numbers",
    "v_step": "megatron_pp.integrations.megatron.steps.v_step",
    "settings_file": "megatron_pp.integrations.megatron.settings_file",
    # Failures.
    "static_buffers": "megatron_pp.plan.verify.static_buffers",
    "instruction_text": "megatron_pp.plan.ir.instruction_text",
    "deadlock_report": "megatron_pp.plan.verify.deadlock_report",
    "histories": "megatron_pp.faults.histories",
    "failing": "megatron_pp.faults.failing",
    "diagnosis": "megatron_pp.faults.diagnosis",
    "host_threads": "megatron_pp.faults.host_threads",
    "abort": "megatron_pp.comm.abort",
    # What features have.
    **module_names(),
}


def is_loaded(name: str) -> bool:
    """Whether the program uses it already: a model of its classes has loaded it."""
    return MODULES[name] in sys.modules


def load(name: str) -> Any:
    """The module of this name in MODULES."""
    return importlib.import_module(MODULES[name])

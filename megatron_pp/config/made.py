"""Checks of a config when it is made. Each raises with the value and the nearest legal one. A step under Megatron does
not load this module, because Megatron makes its own configs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, SupportsFloat

from megatron_pp.config import dtypes, rules
from megatron_pp.config.checks import whole_number
from megatron_pp.config.nearest import nearest_multiples
from megatron_pp.config.step_fields import CHECKS
from megatron_pp.errors import ConfigError, ScheduleError
from megatron_pp.plan import orders
from megatron_pp.plan.ir.feature import hooks_asked_by
from megatron_pp.plan.ir.placement import Placement


def check_made(config: Any) -> None:
    """Check the fields that the schedules and the communication between stages read. Raises ConfigError."""
    _check_values(config)
    _check_parallel_sizes(config)
    _check_dtypes(config)
    _check_schedule(config)
    _check_training(config)


def check_model_sizes(config: Any) -> None:
    hidden, heads = (whole_number(name, getattr(config, name)) for name in ("hidden_size", "num_attention_heads"))
    split = config.tensor_model_parallel_size
    if config.kv_channels is None and hidden % heads:
        raise ConfigError(
            f"hidden_size is {hidden}, which {heads} num_attention_heads do not divide; nearest: "
            f"{nearest_multiples(hidden, heads)}, or set kv_channels"
        )
    if heads % split:
        raise ConfigError(
            f"num_attention_heads is {heads}, which tensor_model_parallel_size {split} does not divide; nearest: "
            f"{nearest_multiples(heads, split)}"
        )
    if not isinstance(config.layernorm_epsilon, SupportsFloat) or not float(config.layernorm_epsilon) > 0.0:
        raise ConfigError(f"layernorm_epsilon is {config.layernorm_epsilon!r}; it must be above 0, such as 1e-5")
    if not isinstance(config.init_method_std, SupportsFloat) or not float(config.init_method_std) >= 0.0:
        raise ConfigError(f"init_method_std is {config.init_method_std!r}; it must be at least 0, such as 0.02")


def _check_values(config: Any) -> None:
    """Check each field by itself, then the fields that exclude each other."""
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), field.metadata.get("kind")
        default = None if field.default is dataclasses.MISSING else field.default
        check = CHECKS.get(field.name) or (kind.accept if kind is not None and kind.when_made else None)
        if check is not None and value is not default:
            check(field.name, value)
    rules.check_timeouts(config)
    rules.lowering_policy(config)


def _check_parallel_sizes(config: Any) -> None:
    if config.sequence_parallel and config.tensor_model_parallel_size == 1:
        raise ConfigError(
            "sequence_parallel is True with tensor_model_parallel_size 1; it splits over the tensor parallel ranks, "
            "so use at least 2 or leave it off"
        )
    small_groups = config.schedule_name in orders.SCHEDULES and orders.SCHEDULES[config.schedule_name].small_groups
    group_size = config.microbatch_group_size_per_vp_stage
    rules.check_group_size(config.pipeline_model_parallel_size, config.num_chunks, group_size, small_groups)


def _check_dtypes(config: Any) -> None:
    dtypes.check_dtype("params_dtype", config.params_dtype)
    if config.pipeline_dtype is not None:
        dtypes.check_dtype("pipeline_dtype", config.pipeline_dtype)
    elif config.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"pipeline_dtype is missing with pipeline_model_parallel_size {config.pipeline_model_parallel_size}; "
            f"it is the dtype of the activations between stages, usually params_dtype ({config.params_dtype})"
        )


def _check_schedule(config: Any) -> None:
    added = hooks_asked_by(config)
    family = rules.schedule_family(config.pipeline_schedule, config.num_chunks, added)
    searched = family.search is not None
    sizes = config.pipeline_model_parallel_size, family.chunks or config.num_chunks
    placement = Placement(family.placement, *sizes)
    if config.pipeline_measured is not None:
        from megatron_pp.config.measured_values import measured_of

        measured_of(config, placement if searched else None)
    for hooks in added:
        hooks.of_config(config, placement, training=True)
    if config.pipeline_placement not in (None, family.placement):
        fitting = [name for name, other in orders.SCHEDULES.items() if other.placement == config.pipeline_placement]
        advice = f", or choose one of {', '.join(fitting)}" if fitting else ""
        raise ScheduleError(
            f"pipeline_placement is {config.pipeline_placement!r}, but {family.name} places stages as "
            f"{family.placement!r}; leave pipeline_placement out{advice}"
        )


def _check_training(config: Any) -> None:
    if config.defer_embedding_wgrad_compute and config.pipeline_model_parallel_size == 1:
        raise ConfigError(
            "defer_embedding_wgrad_compute is True with pipeline_model_parallel_size 1; there is no pipeline flush to "
            "hide it in, so leave it off"
        )

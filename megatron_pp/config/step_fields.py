"""What a step reads of a config, ours or Megatron's: each field with its type, its default, and the check of its value.

``model_config.py`` has the same fields with what they mean; under Megatron, whose configs a step reads, it is not
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_pp.config.checks import (
    callable_or_none,
    check_seconds,
    check_switch,
    check_text,
    one_of,
    whole_number,
)
from megatron_pp.config.dtypes import check_dtype
from megatron_pp.feature_table import CACHES, FSDP_COLLECTIVES
from megatron_pp.plan.ir.spec import CHANNELS

if TYPE_CHECKING:
    from torch import dtype as Dtype

Hook = Callable[..., Any] | None
Hooks = Callable[..., Any] | list[Any] | None


class StepFields(NamedTuple):
    """Fields in the order of their checks. A config that lacks one, or has None there, means the default."""

    tensor_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    enable_autocast: bool = False
    autocast_dtype: Dtype | None = None
    calculate_per_token_loss: bool = False
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    timers: Hook = None
    grad_scale_func: Hook = None
    no_sync_func: Hooks = None
    grad_sync_func: Hooks = None
    param_sync_func: Hooks = None
    finalize_model_grads_func: Hook = None
    overlapped_forward_backward: Hook = None
    barrier_with_L1_time: bool = True  # noqa: N815 (Megatron's name)
    pipeline_dtype: Dtype | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False
    batch_p2p_comm: bool | None = None
    batch_p2p_sync: bool = False
    deallocate_pipeline_outputs: bool = True
    defer_embedding_wgrad_compute: bool = False
    pipeline_schedule: str | None = None
    sequence_slices: int = 1
    balance_sequence_slices: bool = False
    offload_chunks: int | None = None
    offload_slots: int = 1
    fsdp_collectives: str | None = None
    fsdp_max_active_stages: int | None = None
    skip_tensors: Any = None
    skip_cache: str = "received"
    pipeline_measured: Any = None
    p2p_channels: str = "one_way"
    p2p_max_ctas: int | None = None
    max_pending_sends: int = 2
    p2p_timeout: float | None = None
    compute_timeout: float | None = None
    step_number: int | Callable[[], int] | None = None
    warm_up_p2p: bool = True
    device_sync: bool | None = None
    p2p_debug: bool = False
    trace_dir: str | None = None
    trace_steps: str | None = None
    trace_first_step: int = 1
    measure: int = 0
    measure_out: str | None = None
    metrics: Any = 0
    microbatch_costs: Sequence[float] | Callable[[], Sequence[float]] | None = None
    # Sizes of a transformer. A config that describes no layers has no dropout.
    hidden_size: int = 0
    ffn_hidden_size: int | None = None
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    # Fields of Megatron's alone.
    mtp_standalone: bool = False
    cuda_graph_impl: str | bool = False
    fine_grained_activation_offloading: bool = False
    moe_paged_stash: bool = False
    overlap_moe_expert_parallel_comm: bool = False


DEFAULTS: dict[str, Any] = StepFields._field_defaults
IN_ENVIRONMENT = ("p2p_debug", "trace_dir", "trace_steps", "measure", "measure_out")
"""Fields whose default may be in an environment variable."""

_hooks = partial(callable_or_none, several=True)
_path = partial(check_text, kinds=(str, PathLike))

CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "tensor_model_parallel_size": whole_number,
    "virtual_pipeline_model_parallel_size": partial(whole_number, hint="None for a pipeline without chunks"),
    "context_parallel_size": whole_number,
    "sequence_parallel": check_switch,
    "enable_autocast": check_switch,
    "autocast_dtype": check_dtype,
    "calculate_per_token_loss": check_switch,
    "num_microbatches_with_partial_activation_checkpoints": partial(whole_number, at_least=0),
    "timers": callable_or_none,
    "grad_scale_func": callable_or_none,
    "no_sync_func": _hooks,
    "grad_sync_func": _hooks,
    "param_sync_func": _hooks,
    "finalize_model_grads_func": callable_or_none,
    "overlapped_forward_backward": callable_or_none,
    "barrier_with_L1_time": check_switch,
    "variable_seq_lengths": check_switch,
    "overlap_p2p_comm": check_switch,
    "batch_p2p_comm": check_switch,
    "batch_p2p_sync": check_switch,
    "deallocate_pipeline_outputs": check_switch,
    "defer_embedding_wgrad_compute": check_switch,
    "pipeline_schedule": check_text,
    "sequence_slices": whole_number,
    "balance_sequence_slices": check_switch,
    "offload_chunks": partial(whole_number, at_least=0, hint="None for the schedule's own"),
    "offload_slots": whole_number,
    "fsdp_collectives": partial(one_of, known=FSDP_COLLECTIVES),
    "fsdp_max_active_stages": partial(whole_number, hint="None for all"),
    "skip_cache": partial(one_of, known=CACHES),
    "p2p_channels": partial(one_of, known=CHANNELS),
    "p2p_max_ctas": partial(whole_number, hint="None for the pipeline group's own"),
    "max_pending_sends": partial(whole_number, at_least=0),
    "p2p_timeout": check_seconds,
    "compute_timeout": check_seconds,
    "warm_up_p2p": check_switch,
    "device_sync": check_switch,
    "p2p_debug": check_switch,
    "trace_dir": _path,
    "trace_first_step": whole_number,
    "measure": partial(whole_number, at_least=0),
    "measure_out": _path,
}
"""The checks of values that are not the default: (name, value), which raises ConfigError."""

"""The fields of a config, ours or Megatron's, that a step reads: types, defaults, and checks of their values.

``model_config.py`` has the same fields with their help texts. Under Megatron a step reads Megatron's configs, and that
module is not loaded.
"""

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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

# Each type has a check, which is called with (name, value) unless the value is the default. It raises ConfigError.
Hook = Annotated[Callable[..., Any] | None, callable_or_none]
Hooks = Annotated[Callable[..., Any] | list[Any] | None, partial(callable_or_none, several=True)]
_Switch = Annotated[bool, check_switch]
_Choice = Annotated[bool | None, check_switch]  # None: the step decides
_Count = Annotated[int, whole_number]
_FromZero = Annotated[int, partial(whole_number, at_least=0)]
_Seconds = Annotated[float | None, check_seconds]
_Path = Annotated[str | None, partial(check_text, kinds=(str, PathLike))]


class StepFields(NamedTuple):
    """Fields in the order of their checks. If a config lacks a field, or has None there, the default holds."""

    tensor_model_parallel_size: _Count = 1
    virtual_pipeline_model_parallel_size: Annotated[
        int | None, partial(whole_number, hint="None for a pipeline without chunks")
    ] = None
    context_parallel_size: _Count = 1
    sequence_parallel: _Switch = False
    enable_autocast: _Switch = False
    autocast_dtype: Annotated["Dtype | None", check_dtype] = None
    calculate_per_token_loss: _Switch = False
    num_microbatches_with_partial_activation_checkpoints: Annotated[int | None, partial(whole_number, at_least=0)] = (
        None
    )
    timers: Hook = None
    grad_scale_func: Hook = None
    no_sync_func: Hooks = None
    grad_sync_func: Hooks = None
    param_sync_func: Hooks = None
    finalize_model_grads_func: Hook = None
    overlapped_forward_backward: Hook = None
    barrier_with_L1_time: _Switch = True  # noqa: N815 (Megatron's name)
    pipeline_dtype: "Dtype | None" = None
    microbatch_group_size_per_vp_stage: int | None = None
    variable_seq_lengths: _Switch = False
    overlap_p2p_comm: _Switch = False
    batch_p2p_comm: _Choice = None
    batch_p2p_sync: _Switch = False
    deallocate_pipeline_outputs: _Switch = True
    defer_embedding_wgrad_compute: _Switch = False
    pipeline_schedule: Annotated[str | None, check_text] = None
    sequence_slices: _Count = 1
    balance_sequence_slices: _Switch = False
    offload_chunks: Annotated[int | None, partial(whole_number, at_least=0, hint="None for the schedule's own")] = None
    offload_slots: _Count = 1
    fsdp_collectives: Annotated[str | None, partial(one_of, known=FSDP_COLLECTIVES)] = None
    fsdp_max_active_stages: Annotated[int | None, partial(whole_number, hint="None for all")] = None
    skip_tensors: Any = None
    skip_cache: Annotated[str, partial(one_of, known=CACHES)] = "received"
    pipeline_measured: Any = None
    p2p_channels: Annotated[str, partial(one_of, known=CHANNELS)] = "one_way"
    p2p_max_ctas: Annotated[int | None, partial(whole_number, hint="None for the pipeline group's own")] = None
    max_pending_sends: _FromZero = 2
    p2p_timeout: _Seconds = None
    compute_timeout: _Seconds = None
    step_number: int | Callable[[], int] | None = None
    warm_up_p2p: _Switch = True
    device_sync: _Choice = None
    p2p_debug: _Switch = False
    trace_dir: _Path = None
    trace_steps: str | None = None
    trace_first_step: _Count = 1
    measure: _FromZero = 0
    measure_out: _Path = None
    metrics: Any = 0
    microbatch_costs: Sequence[float] | Callable[[], Sequence[float]] | None = None
    # Sizes of a transformer. A config that describes no layers has no dropout.
    hidden_size: int = 0
    ffn_hidden_size: int | None = None
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    # Fields that only Megatron's configs have.
    mtp_standalone: bool = False
    cuda_graph_impl: str | bool = False
    fine_grained_activation_offloading: bool = False
    moe_paged_stash: bool = False
    overlap_moe_expert_parallel_comm: bool = False


DEFAULTS: dict[str, Any] = StepFields._field_defaults
IN_ENVIRONMENT = ("p2p_timeout", "compute_timeout", "p2p_debug", "trace_dir", "trace_steps", "measure", "measure_out")
"""Fields whose default may be in an environment variable."""
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    name: kind.__metadata__[0] for name, kind in StepFields.__annotations__.items() if hasattr(kind, "__metadata__")
}
"""The checks of fields that have one."""

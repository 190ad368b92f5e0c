"""Every option that the engine takes from a config, ours or Megatron's: read once a step, checked, and passed down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_pp.config import rules
from megatron_pp.config.checks import whole_number
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.errors import ConfigError, ScheduleInputError
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_QUEUE, ONE_WAY, STATIC_BUFFERS

if TYPE_CHECKING:
    from megatron_pp.features.skip_tensors.routes import SkipTensor
    from megatron_pp.plan.costs.measured import Measured

TE_GRAPHS = "transformer_engine"
"""Of ``cuda_graph_impl``: layers run in CUDA graphs of Transformer Engine, as Megatron captures them."""
LOCAL_GRAPHS = "local"
"""Of ``cuda_graph_impl``: in graphs that Megatron captures itself, in the order of the first step."""
LAYER_GRAPHS = (TE_GRAPHS, LOCAL_GRAPHS)


class StepSettings(NamedTuple):  # five times faster to make than a frozen dataclass
    """The options of one step, by the names of the config's fields (see `TransformerConfig`).

    A field that the config lacks, as Megatron's configs lack ours, or that is None, has the default of
    `TransformerConfig`, environment variables included."""

    tensor_model_parallel_size: int
    context_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    sequence_parallel: bool
    hidden_size: int
    ffn_hidden_size: int | None
    hidden_dropout: float
    attention_dropout: float
    pipeline_dtype: torch.dtype | None
    enable_autocast: bool
    autocast_dtype: torch.dtype | None
    calculate_per_token_loss: bool
    num_microbatches_with_partial_activation_checkpoints: int | None
    timers: Callable[..., Any] | None
    barrier_with_L1_time: bool  # noqa: N815 (Megatron's name)
    grad_scale_func: Callable[..., Any] | None
    no_sync_func: Any
    grad_sync_func: Any
    param_sync_func: Any
    finalize_model_grads_func: Callable[..., Any] | None
    overlapped_forward_backward: Callable[..., Any] | None
    microbatch_group_size_per_vp_stage: int | None
    variable_seq_lengths: bool
    mtp_standalone: bool
    overlap_p2p_comm: bool
    batch_p2p_comm: bool | None
    batch_p2p_sync: bool
    deallocate_pipeline_outputs: bool
    defer_embedding_wgrad_compute: bool
    cuda_graph_impl: str | bool
    pipeline_schedule: str | None
    sequence_slices: int
    balance_sequence_slices: bool
    offload_chunks: int | None
    offload_slots: int
    skip_tensors: tuple[SkipTensor, ...] | str | None
    skip_cache: str
    pipeline_measured: Measured | dict[str, Any] | str | None
    p2p_channels: str
    p2p_max_ctas: int | None
    max_pending_sends: int
    p2p_timeout: float
    compute_timeout: float | None
    step_number: int | Callable[[], int] | None
    warm_up_p2p: bool
    device_sync: bool | None
    p2p_debug: bool
    trace_dir: str | None
    trace_steps: str | None
    trace_first_step: int
    measure: int
    measure_out: str | None
    pipeline_replan: str | None
    microbatch_costs: Sequence[float] | Callable[[], Sequence[float]] | None

    @classmethod
    def from_config(cls, config: Any, overrides: Mapping[str, Any] | None = None) -> StepSettings:
        """Reads every field of ``config`` once; values in ``overrides``, by field, stand instead of its own. Raises
        ScheduleInputError for an impossible value."""
        if isinstance(config, cls):
            return config
        read = [default if (given := getattr(config, name, None)) is None else given for name, default in _DEFAULTS]
        for position, from_environment in _FROM_ENVIRONMENT:
            if read[position] is None:
                read[position] = from_environment()
        settings = cls._make(read)
        if overrides:
            settings = settings._replace(**overrides)
        checked(rules.check_communication, settings)
        return settings

    @property
    def shapes_vary(self) -> bool:
        """Whether microbatches differ in shape."""
        return bool(self.variable_seq_lengths or self.mtp_standalone)

    @property
    def device_rules(self) -> tuple[str, ...]:
        """The plan's rules of a CUDA device that runs this step; see ``plan.spec``."""
        # Megatron's, around each forward and backward: they synchronise.
        timed = getattr(self.timers, "_log_level", 0) >= 2
        holds = {
            ONE_QUEUE: True,
            DEVICE_SYNC: timed if self.device_sync is None else self.device_sync,
            STATIC_BUFFERS: self.cuda_graph_impl == TE_GRAPHS,
        }
        return tuple(rule for rule, true in holds.items() if true)

    @property
    def one_way(self) -> bool:
        """Whether each direction and kind of message has a channel of its own."""
        return self.p2p_channels == ONE_WAY

    @property
    def policy(self) -> str:
        """'overlap', 'batched' or 'plain': how sends and receives go out."""
        return rules.lowering_policy(self)

    @property
    def traced_steps(self) -> str:
        """Which training steps are recorded, as in ``3,10-12``; empty where tracing is off."""
        return (self.trace_steps or "2-21") if self.trace_dir else ""

    @property
    def patience(self) -> float:
        """Seconds that one operation of a rank whose process lives may take."""
        return self.compute_timeout or 10 * self.p2p_timeout

    def given_microbatch_costs(self, count: int) -> tuple[float, ...]:
        """``microbatch_costs``, called if it is a function; () where there are none. Raises ScheduleInputError unless
        they are ``count`` numbers above 0.
        """
        costs = self.microbatch_costs() if callable(self.microbatch_costs) else self.microbatch_costs
        return () if costs is None else checked(rules.checked_costs, costs, count)

    def given_step_number(self) -> int | None:
        """``step_number``, called if it is a function; None where there is none. Raises ScheduleInputError."""
        number = self.step_number() if callable(self.step_number) else self.step_number
        return None if number is None else checked(whole_number, "step_number", number, 0)


def checked(rule: Callable[..., Any], *args: Any) -> Any:
    """What ``rule`` returns; the one place where its ConfigError becomes the ScheduleInputError of a step."""
    try:
        return rule(*args)
    except ConfigError as error:
        raise ScheduleInputError(f"config.{error}") from error


# In the order of the settings. mtp_standalone and cuda_graph_impl are fields of Megatron's alone; a config that
# describes no layers has no dropout.
_FIELDS = {name: TransformerConfig.__dataclass_fields__.get(name) for name in StepSettings._fields}
_FIELDS |= {"hidden_dropout": None, "attention_dropout": None}
_DEFAULTS: tuple[tuple[str, Any], ...] = tuple(
    (name, False if field is None else None if field.default is dataclasses.MISSING else field.default)
    for name, field in _FIELDS.items()
)
_FROM_ENVIRONMENT = tuple(
    (position, field.default_factory)
    for position, field in enumerate(_FIELDS.values())
    if field is not None and field.default_factory is not dataclasses.MISSING
)

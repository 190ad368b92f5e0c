"""Every option that the engine takes from a config, ours or Megatron's: read once a step, checked, and passed down."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_pp.config import rules
from megatron_pp.config.checks import REMOVED, whole_number, why_removed
from megatron_pp.config.model_config import ModelParallelConfig, TransformerConfig, check_values
from megatron_pp.errors import ConfigError, ScheduleInputError
from megatron_pp.plan.ir.spec import ANY_WAIT, DEVICE_SYNC, ONE_QUEUE, ONE_WAY, STATIC_BUFFERS

TE_GRAPHS = "transformer_engine"
"""Of ``cuda_graph_impl``: layers run in CUDA graphs of Transformer Engine, as Megatron captures them."""
LOCAL_GRAPHS = "local"
"""Of ``cuda_graph_impl``: in graphs that Megatron captures itself, in the order of the first step."""
LAYER_GRAPHS = (TE_GRAPHS, LOCAL_GRAPHS)


_P2P_TIMEOUT = 480.0  # seconds: below the ten minutes of torch's NCCL groups and Megatron's groups
# Of the process group's timeout: the time between is for finding out, and for telling the other ranks.
_TRANSFER_SHARE, _COMPUTE_SHARE = 0.8, 0.95


class Timeouts(NamedTuple):
    """Seconds without an answer to a ``transfer``, and in one operation of a rank whose process lives (``compute``)."""

    transfer: float
    compute: float


# Fields that no step reads.
_NOT_READ = ("pipeline_model_parallel_size", "data_parallel_size", "params_dtype", "pipeline_placement")
_FIELDS = {f.name: f for f in dataclasses.fields(ModelParallelConfig) if f.name not in _NOT_READ}
_FIELDS |= {name: TransformerConfig.__dataclass_fields__[name] for name in ("hidden_size", "ffn_hidden_size")}
_DEFAULTS: dict[str, Any] = {f.name: None if f.default is dataclasses.MISSING else f.default for f in _FIELDS.values()}
# A config that describes no layers has no dropout; the others are fields of Megatron's alone.
_DEFAULTS |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "mtp_standalone": False, "cuda_graph_impl": False}
_DEFAULTS |= {"fine_grained_activation_offloading": False, "moe_paged_stash": False}
_DEFAULTS |= {"overlap_moe_expert_parallel_comm": False}
_FROM_ENVIRONMENT = tuple(
    (list(_DEFAULTS).index(name), field.default_factory)
    for name, field in _FIELDS.items()
    if field.default_factory is not dataclasses.MISSING
)

if TYPE_CHECKING:

    class _Values(TransformerConfig):
        mtp_standalone: bool
        cuda_graph_impl: str | bool
        fine_grained_activation_offloading: bool
        moe_paged_stash: bool
        overlap_moe_expert_parallel_comm: bool
        _make: Any
        _replace: Any

else:  # five times faster to make than a dataclass
    _Values = collections.namedtuple("_Values", _DEFAULTS)


class StepSettings(_Values):
    """The options of one step, by the names of the config's fields (see `TransformerConfig`).

    A field that is missing (Megatron's configs lack ours) or None has the default of `TransformerConfig`, environment
    variables included."""

    __slots__ = ()

    @classmethod
    def from_config(cls, config: Any, overrides: Mapping[str, Any] | None = None) -> StepSettings:
        """Reads every field of ``config`` once; values in ``overrides``, by field, replace its own. Raises
        ScheduleInputError for an impossible value, and for a setting that there was."""
        if isinstance(config, cls):
            return config
        for name in REMOVED:
            if getattr(config, name, None) is not None:
                raise ScheduleInputError(f"config.{why_removed(name)}")
        read = [
            default if (given := getattr(config, name, None)) is None else given for name, default in _DEFAULTS.items()
        ]
        for position, from_environment in _FROM_ENVIRONMENT:
            if read[position] is None:
                read[position] = from_environment()
        settings: StepSettings = cls._make(read)
        if overrides:
            settings = settings._replace(**overrides)
        checked(check_values, settings)
        return settings

    @property
    def shapes_vary(self) -> bool:
        """Whether microbatches differ in shape."""
        return bool(self.variable_seq_lengths or self.mtp_standalone)

    def device_rules(self) -> tuple[str, ...]:
        """The plan's rules of a CUDA device that runs this step; see ``plan.spec``."""
        # Megatron's, around each forward and backward: they synchronise.
        timed = getattr(self.timers, "_log_level", 0) >= 2
        holds = {
            ONE_QUEUE: True,
            ANY_WAIT: self.device_sync is not False,
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

    def timeouts(self, limit: timedelta | None) -> Timeouts:
        """``limit``: after which the process group gives up, with errors that say less. Defaults are below it."""
        most = math.inf if limit is None else limit.total_seconds()
        transfer = self.p2p_timeout
        if transfer is None:
            transfer = min(_P2P_TIMEOUT, _TRANSFER_SHARE * most, self.compute_timeout or math.inf)
        compute = self.compute_timeout or max(transfer, min(10 * transfer, _COMPUTE_SHARE * most))
        return Timeouts(transfer, compute)

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

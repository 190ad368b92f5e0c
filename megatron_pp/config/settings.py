"""The options that the engine reads from a config, ours or Megatron's. Each step reads and checks them once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from megatron_pp.config import rules
from megatron_pp.config.checks import whole_number
from megatron_pp.config.setting_names import variable_of
from megatron_pp.config.step_fields import CHECKS, DEFAULTS, IN_ENVIRONMENT, StepFields
from megatron_pp.errors import ConfigError, ScheduleInputError
from megatron_pp.plan.ir.spec import ONE_WAY

TE_GRAPHS = "transformer_engine"
"""A value of ``cuda_graph_impl``: layers run in CUDA graphs that Megatron captures by Transformer Engine."""
LOCAL_GRAPHS = "local"
"""A value of ``cuda_graph_impl``: Megatron itself captures graphs of layers, in the order of the first step."""
LAYER_GRAPHS = (TE_GRAPHS, LOCAL_GRAPHS)


_P2P_TIMEOUT = 480.0  # seconds: below the ten minutes of torch's NCCL groups and Megatron's groups
# Shares of the process group's timeout. The rest of it is for finding the cause and informing the other ranks.
_TRANSFER_SHARE, _COMPUTE_SHARE = 0.8, 0.95


class Timeouts(NamedTuple):
    """Seconds: of a ``transfer`` without an answer, and of one operation of a rank that is alive (``compute``)."""

    transfer: float
    compute: float


_VARIABLES = [(StepFields._fields.index(name), name, variable_of(name)) for name in IN_ENVIRONMENT]
_CHECKED = [(StepFields._fields.index(name), name, DEFAULTS[name], check) for name, check in CHECKS.items()]


class StepSettings(StepFields):
    """The options of one step, by the names of the config's fields (see `TransformerConfig`).

    A field that is None or missing, as our fields are in Megatron's configs, has the value of its environment variable
    or the default of `StepFields`."""

    __slots__ = ()

    @classmethod
    def from_config(cls, config: Any, overrides: Mapping[str, Any] | None = None) -> StepSettings:
        """``read``, and check the values. Raises ScheduleInputError for an impossible value."""
        settings = cls.read(config, overrides)
        if settings is not config:
            settings.check()
        return settings

    @classmethod
    def read(cls, config: Any, overrides: Mapping[str, Any] | None = None) -> StepSettings:
        """The fields of ``config``, unchecked. Values in ``overrides``, by field, replace them."""
        if isinstance(config, cls):
            return config
        read = [
            default if (given := getattr(config, name, None)) is None else given for name, default in DEFAULTS.items()
        ]
        for position, name, variable in _VARIABLES:
            if os.environ.get(variable) and getattr(config, name, None) is None:
                from megatron_pp.config.kinds import read_variable

                read[position] = read_variable(name)
        settings = cls._make(read)
        return settings._replace(**overrides) if overrides else settings

    def check(self) -> None:
        """Raises ScheduleInputError for an impossible value."""
        checked(_check_values, self)

    @property
    def shapes_vary(self) -> bool:
        """Whether microbatches differ in shape."""
        return bool(self.variable_seq_lengths or self.mtp_standalone)

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
        """Which training steps are recorded, as in ``3,10-12``; empty if tracing is off."""
        return (self.trace_steps or "2-21") if self.trace_dir else ""

    def timeouts(self, limit: timedelta | None) -> Timeouts:
        """The timeouts of a step. Defaults are below ``limit``, the process group's timeout, whose errors say less."""
        most = math.inf if limit is None else limit.total_seconds()
        transfer = self.p2p_timeout
        if transfer is None:
            transfer = min(_P2P_TIMEOUT, _TRANSFER_SHARE * most, self.compute_timeout or math.inf)
        compute = self.compute_timeout or max(transfer, min(10 * transfer, _COMPUTE_SHARE * most))
        return Timeouts(transfer, compute)

    def given_step_number(self) -> int | None:
        """``step_number``, called if it is a function; None if there is none. Raises ScheduleInputError."""
        number = self.step_number() if callable(self.step_number) else self.step_number
        return None if number is None else checked(whole_number, "step_number", number, 0)


def checked(rule: Callable[..., Any], *args: Any) -> Any:
    """The result of ``rule``. Its ConfigError becomes a step's ScheduleInputError, here alone."""
    try:
        return rule(*args)
    except ConfigError as error:
        raise ScheduleInputError(f"config.{error}") from error


def _check_values(settings: StepSettings) -> None:
    """Raises ConfigError for an impossible value."""
    for position, name, default, check in _CHECKED:
        value = settings[position]
        if value is not default:
            check(name, value)
    rules.check_timeouts(settings)
    rules.lowering_policy(settings)

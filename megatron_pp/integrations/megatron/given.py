"""The arguments of `install()`. ``settings.py``, which has the table of settings and reads them, is loaded only if
`install()` was given more than ``strict``.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_pp.config.setting_names import PREFIX, variable_of

FILE_VARIABLE = variable_of("settings")
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("SETTINGS", "NVTX", "PYTHON", "PYTHON_VERSION", "OTHER_PYTHON", "VENV", "TORCH", "URL", "LAUNCHER"),
        *("BENCHMARK_MEGATRON_SOURCE", "TEST_JOBS", "TEST_AUTOGRAD_THREAD", "EXHAUSTIVE", "FUZZ", "RACE_REPEATS"),
        "SCREENSHOTS",
    )
)
"""Environment variables of this project's scripts, build, benchmarks and tests, which are not settings."""


@dataclass(frozen=True)
class InstallSettings:
    """The settings that `install()` was given. ``overrides``: field of `StepSettings` -> the value that replaces the
    config's. The other fields are settings of the plug-in itself (``SWITCHES`` of ``settings.py``).
    """

    strict: bool = False
    any_microbatch_count: bool = False
    split_weight_grad: bool = True
    whole_sequence_loss: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)


def in_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variable -> text of the settings in ``environment``. An empty variable counts as not set."""
    return {
        variable: text
        for variable, text in environment.items()
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES and text
    }


def with_overrides(config: Any, overrides: Mapping[str, Any]) -> Any:
    """The config, or a copy with the values of ``overrides`` if any of them differ."""
    changed = {name: value for name, value in overrides.items() if getattr(config, name, value) != value}
    if not changed:
        return config
    config = copy.copy(config)
    vars(config).update(changed)
    return config

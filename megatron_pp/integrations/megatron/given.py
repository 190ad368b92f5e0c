"""What `install()` was given, and whether it was given more than ``strict``: ``settings.py``, which has the table of
settings and reads them, is loaded for that alone.
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
"""Variables of this project that are no settings: of its scripts, build, benchmarks and tests."""


@dataclass(frozen=True)
class InstallSettings:
    """What `install()` was given. ``overrides``: field of `StepSettings` -> the value that replaces the config's; the
    others are settings of the plug-in itself (``SWITCHES`` of ``settings.py``).
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
    """The config; where fields of it have other values in ``overrides``, a copy with these."""
    changed = {name: value for name, value in overrides.items() if getattr(config, name, value) != value}
    if not changed:
        return config
    config = copy.copy(config)
    vars(config).update(changed)
    return config

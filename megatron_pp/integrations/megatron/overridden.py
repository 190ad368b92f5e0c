"""Configs with values that `install()` overrides."""

import copy
from collections.abc import Mapping
from typing import Any


def with_overrides(config: Any, overrides: Mapping[str, Any]) -> Any:
    """The config, or a copy with the values of ``overrides`` if any of them differ."""
    changed = {name: value for name, value in overrides.items() if getattr(config, name, value) != value}
    if not changed:
        return config
    config = copy.copy(config)
    vars(config).update(changed)
    return config

"""Reading and checking of dtypes in settings. Only this module of the config loads torch: plans need no torch."""

from typing import Any

from megatron_pp.errors import ConfigError


def dtype_named(name: str, unknown: Any = None) -> Any:
    """The dtype of ``torch.bfloat16`` or ``bfloat16``. Returns ``unknown`` if torch has no dtype of this name."""
    import torch

    return getattr(torch, name.removeprefix("torch."), unknown)


def check_dtype(name: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is a floating point dtype."""
    import torch

    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ConfigError(f"{name} is {value!r}; it must be a floating point torch.dtype such as torch.bfloat16")

"""A dtype as settings give it. Here alone the config loads torch, as plans and their files need none."""

from typing import Any

from megatron_pp.errors import ConfigError


def dtype_named(name: str, unknown: Any = None) -> Any:
    """``torch.bfloat16`` or ``bfloat16`` -> the dtype; ``unknown`` where torch has none of this name."""
    import torch

    return getattr(torch, name.removeprefix("torch."), unknown)


def check_dtype(name: str, value: Any) -> None:
    """Raises ConfigError."""
    import torch

    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ConfigError(f"{name} is {value!r}; it must be a floating point torch.dtype such as torch.bfloat16")

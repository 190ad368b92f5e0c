"""Looks through the wrappers of a model: DistributedDataParallel and its like hold the model as ``module``."""

from collections.abc import Sequence
from typing import Any

import torch

_MISSING = object()


def unwrapped(model: Any) -> Any:
    """The model inside its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def wrapped_attribute(model: Any, name: str, default: Any = None) -> Any:
    """The attribute ``name`` of the model, or of the model that it wraps."""
    return wrapped_attributes(model, (name,), default)[0]


def wrapped_attributes(model: Any, names: Sequence[str], default: Any = None) -> list[Any]:
    """As ``wrapped_attribute``, for several names."""
    found: dict[str, Any] = {}
    missing = names
    while missing and model is not None:
        for name in missing:
            value = _attribute(model, name)
            if value is not _MISSING and (value is not None or name != "config"):  # as Megatron's get_model_config
                found[name] = value
        missing = [name for name in missing if name not in found]
        inner = _attribute(model, "module") if missing else None
        model = None if inner is _MISSING else inner
    found = dict.fromkeys(names, default) | found
    return [found[name] for name in names]


def _attribute(model: Any, name: str) -> Any:
    """The attribute, or _MISSING. ``getattr`` of a missing attribute raises, which costs microseconds. So the tables of
    plain modules are read instead.
    """
    kind = type(model)
    if getattr(kind, "__getattr__", None) is not torch.nn.Module.__getattr__ or hasattr(kind, name):
        return getattr(model, name, _MISSING)
    own = model.__dict__
    for held in (own, own["_modules"], own["_parameters"], own["_buffers"]):
        if name in held:
            return held[name]
    return _MISSING

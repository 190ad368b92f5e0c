"""Looking through the wrappers of a model: DistributedDataParallel and its like hold what they wrap as ``module``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_MISSING = object()


def wrapped_attribute(model: Any, name: str, default: Any = None) -> Any:
    """``name`` of the model, or of what it wraps."""
    return wrapped_attributes(model, (name,), default)[0]


def wrapped_attributes(model: Any, names: Sequence[str], default: Any = None) -> list[Any]:
    """As ``wrapped_attribute``, of several names."""
    found = [default] * len(names)
    missing: Sequence[int] = range(len(names))
    while missing and model is not None:
        values = [(k, _attribute(model, names[k])) for k in missing]
        for k, value in values:
            if value is not _MISSING:
                found[k] = value
        missing = [k for k, value in values if value is _MISSING]
        model = _attribute(model, "module") if missing else None
        model = None if model is _MISSING else model
    return found


def _attribute(model: Any, name: str) -> Any:
    """The attribute, or _MISSING. A module that lacks it raises, which costs microseconds for each name and step; so
    modules that say what they have are looked into.
    """
    kind = type(model)
    if getattr(kind, "__getattr__", None) is not torch.nn.Module.__getattr__ or hasattr(kind, name):
        return getattr(model, name, _MISSING)
    own = model.__dict__
    for held in (own, own["_modules"], own["_parameters"], own["_buffers"]):
        if name in held:
            return held[name]
    return _MISSING

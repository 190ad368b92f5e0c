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
    found: dict[str, Any] = {}
    missing = list(names)
    while missing and model is not None and model is not _MISSING:
        found |= {name: _attribute(model, name) for name in missing}
        missing = [name for name in missing if found[name] is _MISSING]
        model = _attribute(model, "module") if missing else None
    return [default if found.get(name, _MISSING) is _MISSING else found[name] for name in names]


def _attribute(model: Any, name: str) -> Any:
    """The attribute, or _MISSING. A module that lacks it raises, which costs microseconds for each name and step; so
    the dictionaries of a plain module are searched.
    """
    kind = type(model)
    if getattr(kind, "__getattr__", None) is not torch.nn.Module.__getattr__ or hasattr(kind, name):
        return getattr(model, name, _MISSING)
    own = model.__dict__
    for held in (own, own["_modules"], own["_parameters"], own["_buffers"]):
        if name in held:
            return held[name]
    return _MISSING

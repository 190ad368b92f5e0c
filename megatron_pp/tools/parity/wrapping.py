"""Functions of Megatron-core and torch, called by functions of ours that are given the original."""

import functools
from collections.abc import Callable
from typing import Any


def wrapped(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """What calls ``function(original, *args, **kwargs)`` under the name of ``original``."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return called


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Put ``wrapped`` in the place of ``owner.name``."""
    setattr(owner, name, wrapped(getattr(owner, name), function))

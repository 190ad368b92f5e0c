"""Replaces functions of Megatron-core and torch by our functions, which get the original as an argument."""

import functools
from collections.abc import Callable
from typing import Any


def wrapped(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``function(original, *args, **kwargs)`` and has the name of ``original``."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return called


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replaces ``owner.name`` by ``wrapped``."""
    setattr(owner, name, wrapped(getattr(owner, name), function))

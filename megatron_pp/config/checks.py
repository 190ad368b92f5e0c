"""Checks of single values that steps read. Never imports torch."""

import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

from megatron_pp.common.names import did_you_mean
from megatron_pp.errors import ConfigError


def whole_number(
    name: str, value: object, at_least: int = 1, error: type[ValueError] = ConfigError, hint: str = ""
) -> int:
    """``value`` as an int. Raises ``error`` unless it is a whole number of at least ``at_least``. numpy's integers are
    accepted, bools are not."""
    hint = hint and f" ({hint})"
    # The type is compared first: isinstance() with SupportsIndex takes microseconds, and each step checks many values.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, SupportsIndex)):
        raise error(f"{name} is {value!r}; it must be a whole number of at least {at_least}{hint}")
    whole = operator.index(value)
    if whole < at_least:
        raise error(f"{name} is {whole}; the smallest legal value is {at_least}{hint}")
    return whole


def one_of(name: str, value: Any, known: Iterable[object]) -> Any:
    """``value``. Raises ConfigError unless it is one of ``known``."""
    choices = list(known)
    if value not in choices:
        hint = did_you_mean(value, choices)
        raise ConfigError(f"{name} is {value!r}{hint}; it must be one of {', '.join(map(repr, choices))}")
    return value


def check_switch(name: str, value: Any) -> Any:
    """``value``. Raises ConfigError unless it equals True or False, as 0, 1 and numpy's bools do."""
    if isinstance(value, str) or value not in (False, True):
        raise ConfigError(f"{name} is {value!r}; it must be True or False")
    return value


def check_text(name: str, value: Any, kinds: Any = str) -> Any:
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} is {value!r}; it must be a text")
    return value


def check_seconds(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds above 0, such as 600.0")
    return value


def callable_or_none(name: str, value: Any, several: bool = False) -> Any:
    """``value``. Raises ConfigError unless it is a callable, a list of them if ``several``, or None."""
    given = value if several and isinstance(value, (list, tuple)) else [value]
    if value is not None and not all(map(callable, given)):
        others = ", or a list of one per chunk, or None" if several else ", or None"
        raise ConfigError(f"{name} is {value!r}; it must be a callable{others}")
    return value

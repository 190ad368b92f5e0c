"""The errors that configuration raises, and the checks shared by the modules that raise them. Never imports torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import SupportsIndex


class ConfigError(ValueError):
    """A configuration value is impossible, or two contradict each other. Raised before any communication."""


class LayoutError(ConfigError):
    """Layers cannot be placed over the stages so that each is placed exactly once."""


class MicrobatchCountError(ConfigError):
    """The number of microbatches is not a whole number of at least 1."""


class ScheduleError(ConfigError):
    """The schedule is not known, or does not fit the number of model chunks or the placement."""


class WorldSizeError(ConfigError):
    """The number of processes does not fit the grid of parallel sizes."""


def whole_number(
    name: str, value: object, at_least: int = 1, error: type[ValueError] = ConfigError, hint: str = ""
) -> int:
    """``value`` as an int, if it is a whole number (numpy's are, a bool is none) of at least ``at_least``; raises
    ``error`` otherwise."""
    # The type first: asking whether something SupportsIndex takes microseconds, and every step asks several times.
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, SupportsIndex)):
        raise error(f"{name} is {value!r}; it must be a whole number of at least {at_least}{_after(hint)}")
    whole = operator.index(value)
    if whole < at_least:
        raise error(f"{name} is {whole}; the smallest legal value is {at_least}{_after(hint)}")
    return whole


def one_of(name: str, value: object, known: Iterable[object], error: type[ConfigError] = ConfigError) -> None:
    """Raises ``error`` unless ``value`` is one of ``known``."""
    choices = list(known)
    if value not in choices:
        raise error(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def _after(hint: str) -> str:
    return f" ({hint})" if hint else ""

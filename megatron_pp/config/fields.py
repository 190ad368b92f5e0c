"""How a config field is written: its default, one line of help, and whether it makes a command-line flag."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from megatron_pp.errors import ConfigError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def setting(
    default: Any, help_text: str, *, choices: Iterable[str] = (), cli: bool = True, section: str | None = None
) -> Any:
    """A dataclass field. Metadata: help, choices, cli, and, on the first field of a section, the section's name."""
    metadata = {"help": help_text, "choices": tuple(choices), "cli": cli, "section": section}
    if isinstance(default, partial):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def hook(help_text: str, section: str | None = None) -> Any:
    """A field for callables, so never a flag."""
    return setting(None, help_text, cli=False, section=section)


def setting_from_env(variable: str, read: Callable[[str], Any], help_text: str) -> Any:
    """A dataclass field whose default is ``read`` of an environment variable ("" if unset) when the object is made."""
    return setting(partial(_read_variable, variable, read), f"{help_text} [env {variable}]")


def read_flag(text: str) -> bool:
    """A switch in an environment variable. Raises ConfigError for anything but 1/true/yes/on and 0/false/no/off."""
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ConfigError(f"{text!r} is not a switch; it must be 1, true, yes or on, or 0, false, no or off")
    return word in _TRUE


def read_text(text: str) -> str | None:
    """Text in an environment variable; None where it is unset or empty."""
    return text or None


def read_count(text: str) -> int:
    """A number in an environment variable; 0 where it is unset or empty. Raises ConfigError."""
    try:
        return int(text or 0)
    except ValueError:
        raise ConfigError(f"{text!r} is no whole number") from None


def _read_variable(variable: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(os.environ.get(variable, ""))
    except ConfigError as error:
        raise ConfigError(f"environment variable {variable}: {error}") from None

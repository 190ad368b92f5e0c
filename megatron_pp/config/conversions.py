"""Conversions of values that `install()` or an environment variable gives: strings are parsed, names are looked up. A
function that takes a setting's name and a value returns the value that the engine uses, or raises ConfigError. Never
imports torch.
"""

import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_pp.config import rules
from megatron_pp.config.checks import one_of, whole_number
from megatron_pp.config.dtypes import check_dtype, dtype_named
from megatron_pp.errors import ConfigError, ScheduleInputError
from megatron_pp.on_demand import load

_STEPS = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def read_flag(text: str) -> bool:
    """The value of a switch in the environment. Raises ConfigError unless it is empty, or one of 1, true, yes, on, 0,
    false, no, off."""
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ConfigError(f"{text!r} is not a switch; it must be 1, true, yes or on, or 0, false, no or off")
    return word in _TRUE


def read_number(text: str) -> Any:
    """The int or float that ``text`` holds. Any other text is returned unchanged: ``accept`` rejects it with an error
    that names the accepted values."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _path_or_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def text(name: str, value: Any) -> str:
    text = _path_or_text(value)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name} is {value!r}; it must be a text")
    return text


def schedule(name: str, value: Any) -> str:
    found = text(name, value)
    rules.known_family(found)
    return found


def measured(name: str, value: Any) -> Any:
    value = _path_or_text(value)
    from megatron_pp.config.measured_values import measured_of

    measured_of(SimpleNamespace(pipeline_measured=value))
    return value


def dtype(name: str, value: Any) -> Any:
    dtype = dtype_named(value, value) if isinstance(value, str) else value
    check_dtype(name, dtype)
    return dtype


def steps(name: str, value: Any) -> str:
    found = text(name, value)
    try:
        chosen_steps(found)
    except ScheduleInputError as error:
        raise ConfigError(str(error)) from error
    return found


def chosen_steps(text: str) -> list[range]:
    """``3,10-12`` -> the steps 3, 10, 11, 12. Raises ScheduleInputError."""
    ranges = []
    for part in text.split(","):
        found = _STEPS.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise ScheduleInputError(f"trace_steps is {text!r}; it must list steps, as in 3,10-12")
        ranges.append(range(first, last + 1))
    return ranges


def function_of(module: str, names: str, name: str, value: Any) -> Callable[..., Any]:
    if callable(value):
        return value
    functions: dict[str, Callable[..., Any]] = getattr(load(module), names)
    one_of(name, value, functions)
    return functions[value]


def step_number(name: str, value: Any) -> Any:
    return value if callable(value) else whole_number(name, value, at_least=0, hint="or a function that returns it")


def microbatch_costs(name: str, value: Any) -> Any:
    from megatron_pp.config.measured_values import checked_costs

    return value if callable(value) else checked_costs(value)


def metrics(name: str, value: Any) -> Any:
    return value if callable(value) else whole_number(name, value, at_least=0, hint="or a function of step and numbers")

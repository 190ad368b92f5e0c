"""What kinds of settings there are: how a value is checked, and how a text becomes one. Never imports torch."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from megatron_pp.config import rules
from megatron_pp.config.checks import callable_or_none, one_of, whole_number
from megatron_pp.errors import ConfigError, ScheduleInputError
from megatron_pp.on_demand import load

PREFIX = "MEGATRON_PP_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


NEVER, MADE, EVERY_STEP = range(3)


class Kind(NamedTuple):
    """
    accept        (name, value) -> the value as the engine takes it; raises ConfigError
    read          text of an environment variable or a flag -> a value for ``accept``
    checked       when the value of a config is checked too: NEVER, when it is MADE, or in EVERY_STEP besides
    install       whether it is a setting of `install()`
    only_keyword  one that can be given as a keyword alone
    choices       all values, where they are few
    """

    accept: Callable[[str, Any], Any]
    read: Callable[[str], Any] = str
    checked: int = NEVER
    install: bool = True
    only_keyword: bool = False
    choices: tuple[str, ...] = ()

    def value_of(self, name: str, text: str, where: str) -> Any:
        """The value that ``text`` gives the setting ``name``. Raises ConfigError; ``where`` says where the text is
        from.
        """
        try:
            return self.accept(name, self.read(text))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def read_flag(text: str) -> bool:
    """A switch in an environment variable. Raises ConfigError for anything but 1/true/yes/on and 0/false/no/off."""
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ConfigError(f"{text!r} is not a switch; it must be 1, true, yes or on, or 0, false, no or off")
    return word in _TRUE


def _read_number(text: str) -> Any:
    """Text that is no number is returned as it is, for ``accept`` to say what would be right."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def _path_or_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _text(name: str, value: Any) -> str:
    text = _path_or_text(value)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name} is {value!r}; it must be a text")
    return text


def _schedule(name: str, value: Any) -> str:
    text = _text(name, value)
    rules.known_family(text)
    return text


def _measured(name: str, value: Any) -> Any:
    value = _path_or_text(value)
    rules.measured_of(SimpleNamespace(pipeline_measured=value))
    return value


def _dtype(name: str, value: Any) -> Any:
    dtype = getattr(load("torch"), value.removeprefix("torch."), value) if isinstance(value, str) else value
    rules.check_dtype(name, dtype)
    return dtype


def _steps(name: str, value: Any) -> str:
    text = _text(name, value)
    try:
        load("trace_dir").chosen_steps(text)
    except ScheduleInputError as error:
        raise ConfigError(str(error)) from error
    return text


def _replan(name: str, value: Any) -> Any:
    rules.replan_steps(name, value)
    return value


def _pairs(name: str, value: Any) -> Callable[..., Any]:
    if callable(value):
        return value
    functions: dict[str, Callable[..., Any]] = load("pairs").PAIR_FUNCTIONS
    one_of(name, value, functions)
    return functions[value]


def _step_number(name: str, value: Any) -> Any:
    return value if callable(value) else whole_number(name, value, at_least=0, hint="or a function that returns it")


def _microbatch_costs(name: str, value: Any) -> Any:
    return value if callable(value) else rules.checked_costs(value)


def count(at_least: int = 1, hint: str = "", **more: Any) -> Kind:
    """Whole numbers."""
    return Kind(partial(whole_number, at_least=at_least, hint=hint), _read_number, **{"checked": EVERY_STEP, **more})


def choice(choices: Sequence[str], **more: Any) -> Kind:
    """One of several words."""
    return Kind(partial(one_of, known=choices), choices=tuple(choices), **more)


HOOK = Kind(callable_or_none, checked=MADE, install=False)
HOOKS = Kind(partial(callable_or_none, several=True), checked=MADE, install=False)
SIZE = count(checked=MADE, install=False)
SWITCH = Kind(_switch, read_flag)
SECONDS = Kind(rules.check_seconds, _read_number, checked=EVERY_STEP)
TEXT = Kind(_text)
STEPS = Kind(_steps)
SCHEDULE = Kind(_schedule)
MEASURED = Kind(_measured)
REPLAN = Kind(_replan, checked=EVERY_STEP)
DTYPE = Kind(_dtype)
PAIRS = Kind(_pairs)
STEP_NUMBER = Kind(_step_number, only_keyword=True)
MICROBATCH_COSTS = Kind(_microbatch_costs, only_keyword=True)

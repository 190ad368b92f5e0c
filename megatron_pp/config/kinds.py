"""The kinds of settings: how a value given to `install()` is checked, and how text is read as a value. A config checks
its other fields when it is made; ``step_fields.py`` has the checks of fields that steps read. Never imports torch.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from megatron_pp.config import checks
from megatron_pp.config.setting_names import variable_of
from megatron_pp.config.step_fields import CHECKS
from megatron_pp.errors import ConfigError

Accept = Callable[[str, Any], Any]


class Kind(NamedTuple):
    """Which values a setting takes, and how they are checked.

    accept        (name, value) -> the value that the engine uses; raises ConfigError
    read          text of an environment variable or a flag -> a value for ``accept``
    when_made     whether a config calls ``accept`` when it is made; False if steps check the field
    install       whether it is a setting of `install()`
    only_keyword  whether it can only be given as a keyword, not as text
    choices       all accepted values, if they can be listed
    """

    accept: Accept
    read: Callable[[str], Any] = str
    when_made: bool = False
    install: bool = True
    only_keyword: bool = False
    choices: tuple[str, ...] = ()

    def value_of(self, name: str, text: str, where: str) -> Any:
        """The value of the setting ``name`` that ``text`` gives. Raises ConfigError; its message begins with
        ``where``."""
        try:
            return self.accept(name, self.read(text))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _convert(function: str, *args: Any) -> Any:
    """The result of this function of `conversions`. That module is loaded only when a value is converted."""
    from megatron_pp.config import conversions

    return getattr(conversions, function)(*args)


_read_number = partial(_convert, "read_number")


def as_in_steps(name: str, value: Any) -> Any:
    """``value``. Raises ConfigError unless it passes the check that steps make of the field ``name``."""
    return CHECKS[name](name, value)


def _switch(name: str, value: Any) -> Any:
    """``value``. Raises ConfigError unless it is a bool: a setting that Megatron lacks does not accept 0 or 1."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def _probability(name: str, value: Any) -> Any:
    if not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise ConfigError(f"{name} is {value!r}; it is a probability from 0.0 up to, but not including, 1.0")
    return value


def choice(choices: Sequence[str], accept: Accept = as_in_steps, **more: Any) -> Kind:
    """The kind of a setting whose value is one of ``choices``."""
    return Kind(accept, choices=tuple(choices), **more)


def function_of(module: str, names: str) -> Kind:
    """The kind of a setting that is a function, or its name in the dict ``names`` of a feature's ``module``."""
    return Kind(partial(_convert, "function_of", module, names))


HOOK = Kind(as_in_steps, install=False)
PROBABILITY = Kind(_probability, when_made=True, install=False)
COUNT = Kind(as_in_steps, _read_number)
GROUP_SIZE = COUNT._replace(accept=checks.whole_number)
SIZE = Kind(checks.whole_number, _read_number, when_made=True, install=False)
SWITCH = Kind(_switch, partial(_convert, "read_flag"))
FLAG = Kind(checks.check_switch, partial(_convert, "read_flag"), when_made=True, install=False)
SECONDS = Kind(as_in_steps, _read_number)
TEXT = Kind(partial(_convert, "text"))
STEPS = Kind(partial(_convert, "steps"), when_made=True)
SCHEDULE = Kind(partial(_convert, "schedule"))
MEASURED = Kind(partial(_convert, "measured"))
DTYPE = Kind(partial(_convert, "dtype"))
AUTOCAST = Kind(as_in_steps, install=False)
STEP_NUMBER = Kind(partial(_convert, "step_number"), only_keyword=True)
METRICS = Kind(partial(_convert, "metrics"), _read_number)
MICROBATCH_COSTS = Kind(partial(_convert, "microbatch_costs"), only_keyword=True)

IN_ENVIRONMENT = {
    "p2p_timeout": SECONDS,
    "compute_timeout": SECONDS,
    "p2p_debug": SWITCH,
    "trace_dir": TEXT,
    "trace_steps": STEPS,
    "measure": COUNT,
    "measure_out": TEXT,
}
"""The kinds of fields whose default may be in an environment variable."""


def read_variable(name: str) -> Any:
    """The value of a field's environment variable, None if it is not set or empty. Raises ConfigError."""
    variable = variable_of(name)
    text = os.environ.get(variable)
    return IN_ENVIRONMENT[name].value_of(name, text, f"environment variable {variable}") if text else None

"""What kinds of settings there are: how a value of `install()` is checked, and how a text becomes one. Never imports
torch. Of a config, ``step_fields.py`` checks what steps read, and a config itself the rest when it is made.
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
    """What values a setting takes.

    accept        (name, value) -> the value as the engine takes it; raises ConfigError
    read          text of an environment variable or a flag -> a value for ``accept``
    when_made     whether ``accept`` checks the value of a config when that is made; not for what steps check
    install       whether it is a setting of `install()`
    only_keyword  one that can be given as a keyword alone
    choices       all values, where they are few
    """

    accept: Accept
    read: Callable[[str], Any] = str
    when_made: bool = False
    install: bool = True
    only_keyword: bool = False
    choices: tuple[str, ...] = ()

    def value_of(self, name: str, text: str, where: str) -> Any:
        """The value that ``text`` gives the setting ``name``. Raises ConfigError, which begins with ``where``."""
        try:
            return self.accept(name, self.read(text))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _convert(function: str, *args: Any) -> Any:
    """What this function of `conversions`, which is loaded here, returns."""
    from megatron_pp.config import conversions

    return getattr(conversions, function)(*args)


_read_number = partial(_convert, "read_number")


def as_in_steps(name: str, value: Any) -> Any:
    """``value``, if it passes the check of steps for the field ``name``."""
    return CHECKS[name](name, value)


def _switch(name: str, value: Any) -> Any:
    """``value``, a setting of ours: no number stands for it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def _probability(name: str, value: Any) -> Any:
    if not isinstance(value, (int, float)) or not 0.0 <= value < 1.0:
        raise ConfigError(f"{name} is {value!r}; it is a probability from 0.0 up to, but not including, 1.0")
    return value


def choice(choices: Sequence[str], accept: Accept = as_in_steps, **more: Any) -> Kind:
    """One of several words."""
    return Kind(accept, choices=tuple(choices), **more)


def function_of(module: str, names: str) -> Kind:
    """A function, or the name of one of those in ``names`` of the module that a feature has."""
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
    "p2p_debug": SWITCH,
    "trace_dir": TEXT,
    "trace_steps": STEPS,
    "measure": COUNT,
    "measure_out": TEXT,
}
"""The kinds of fields whose default may be in an environment variable."""


def read_variable(name: str) -> Any:
    """What its environment variable says of a field of IN_ENVIRONMENT; None where that is not set, or empty. Raises
    ConfigError."""
    variable = variable_of(name)
    text = os.environ.get(variable)
    return IN_ENVIRONMENT[name].value_of(name, text, f"environment variable {variable}") if text else None

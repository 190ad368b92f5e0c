"""What kinds of settings there are: how a value is checked, and how a text becomes one. Never imports torch."""

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

from megatron_pp.config import checks, dtypes
from megatron_pp.errors import ConfigError

PREFIX = "MEGATRON_PP_"
NEVER, MADE, EVERY_STEP = range(3)


class Kind(NamedTuple):
    """What values a setting takes.

    accept        (name, value) -> the value as the engine takes it; raises ConfigError
    read          text of an environment variable or a flag -> a value for ``accept``
    checked       when the value of a config is checked too: NEVER, when it is MADE, or then and in EVERY_STEP
    install       whether it is a setting of `install()`
    only_keyword  one that can be given as a keyword alone
    choices       all values, where they are few
    check         what checks the value of a config, which stays as it is, in place of ``accept``
    """

    accept: Callable[[str, Any], Any]
    read: Callable[[str], Any] = str
    checked: int = NEVER
    install: bool = True
    only_keyword: bool = False
    choices: tuple[str, ...] = ()
    check: Callable[[str, Any], Any] | None = None

    def value_of(self, name: str, text: str, where: str) -> Any:
        """The value that ``text`` gives the setting ``name``. Raises ConfigError, which begins with ``where``."""
        try:
            return self.accept(name, self.read(text))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def _convert(function: str, *args: Any) -> Any:
    """What this function of `conversions`, which is loaded here, returns."""
    from megatron_pp.config import conversions

    return getattr(conversions, function)(*args)


_read_number = partial(_convert, "read_number")


def count(at_least: int = 1, hint: str = "", **more: Any) -> Kind:
    """Whole numbers."""
    return Kind(
        partial(checks.whole_number, at_least=at_least, hint=hint), _read_number, **{"checked": EVERY_STEP, **more}
    )


def choice(choices: Sequence[str], **more: Any) -> Kind:
    """One of several words."""
    return Kind(partial(checks.one_of, known=choices), choices=tuple(choices), **more)


def function_of(module: str, names: str) -> Kind:
    """A function, or the name of one of those in ``names`` of the module that a feature has."""
    return Kind(partial(_convert, "function_of", module, names), checked=EVERY_STEP, check=checks.callable_or_none)


HOOK = Kind(checks.callable_or_none, checked=EVERY_STEP, install=False)
HOOKS = Kind(partial(checks.callable_or_none, several=True), checked=EVERY_STEP, install=False)
PROBABILITY = Kind(checks.check_probability, checked=MADE, install=False)
SIZE = count(install=False)
SWITCH = Kind(checks.switch, partial(_convert, "read_flag"), EVERY_STEP, check=checks.check_switch)
FLAG = SWITCH._replace(install=False)
SECONDS = Kind(checks.check_seconds, _read_number, checked=EVERY_STEP)
TEXT = Kind(partial(_convert, "text"), checked=EVERY_STEP, check=partial(checks.check_text, kinds=(str, PathLike)))
STEPS = Kind(partial(_convert, "steps"), checked=MADE)
SCHEDULE = Kind(partial(_convert, "schedule"), checked=EVERY_STEP, check=checks.check_text)
MEASURED = Kind(partial(_convert, "measured"))
DTYPE = Kind(partial(_convert, "dtype"))
AUTOCAST = Kind(dtypes.check_dtype, checked=EVERY_STEP, install=False)
STEP_NUMBER = Kind(partial(_convert, "step_number"), only_keyword=True)
MICROBATCH_COSTS = Kind(partial(_convert, "microbatch_costs"), only_keyword=True)

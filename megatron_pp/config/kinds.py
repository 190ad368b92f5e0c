"""What kinds of settings there are: how a value is checked, and how a text becomes one. Never imports torch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from megatron_pp.config import checks
from megatron_pp.errors import ConfigError
from megatron_pp.on_demand import load

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
    """

    accept: Callable[[str, Any], Any]
    read: Callable[[str], Any] = str
    checked: int = NEVER
    install: bool = True
    only_keyword: bool = False
    choices: tuple[str, ...] = ()

    def value_of(self, name: str, text: str, where: str) -> Any:
        """The value that ``text`` gives the setting ``name``. Raises ConfigError, which begins with ``where``."""
        try:
            return self.accept(name, self.read(text))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def _later(function: str) -> Callable[..., Any]:
    """A function of `conversions`, which is loaded when it is called."""
    return partial(_call, function)


def _call(function: str, *args: Any) -> Any:
    return getattr(load("conversions"), function)(*args)


_read_number = _later("read_number")


def count(at_least: int = 1, hint: str = "", **more: Any) -> Kind:
    """Whole numbers."""
    return Kind(
        partial(checks.whole_number, at_least=at_least, hint=hint), _read_number, **{"checked": EVERY_STEP, **more}
    )


def choice(choices: Sequence[str], **more: Any) -> Kind:
    """One of several words."""
    return Kind(partial(checks.one_of, known=choices), choices=tuple(choices), **more)


HOOK = Kind(checks.callable_or_none, checked=MADE, install=False)
HOOKS = Kind(partial(checks.callable_or_none, several=True), checked=MADE, install=False)
PROBABILITY = Kind(checks.check_probability, checked=MADE, install=False)
SIZE = count(checked=MADE, install=False)
SWITCH = Kind(_later("switch"), _later("read_flag"))
SECONDS = Kind(checks.check_seconds, _read_number, checked=EVERY_STEP)
REPLAN = Kind(checks.check_replan, checked=EVERY_STEP)
TEXT = Kind(_later("text"))
STEPS = Kind(_later("steps"))
SCHEDULE = Kind(_later("schedule"))
MEASURED = Kind(_later("measured"))
DTYPE = Kind(_later("dtype"))
PAIRS = Kind(_later("pairs"))
STEP_NUMBER = Kind(_later("step_number"), only_keyword=True)
MICROBATCH_COSTS = Kind(_later("microbatch_costs"), only_keyword=True)

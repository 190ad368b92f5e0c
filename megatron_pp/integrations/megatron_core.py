"""Megatron-core's training loop on this engine: one line, `install()`.

    from megatron_pp.integrations import megatron_core
    megatron_core.install()

Afterwards Megatron's three schedule functions, `forward_backward_no_pipelining` and the two for pipelines, run through
this engine, wherever their names have been imported to; so Megatron's own `get_forward_backward_func` returns them.
Models, optimizers, data-parallel wrappers, configs, process groups and the forward and backward of one microbatch stay
Megatron's. Megatron's own schedule runs what the engine does not serve, with one warning that names the reason;
`install(strict=True)` raises NotServedError instead.
"""

import atexit
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike
from types import ModuleType
from typing import Any

from megatron_pp.errors import NotServedError, UnknownMegatronError
from megatron_pp.integrations.gpt_models import place_models, restore_models
from megatron_pp.integrations.megatron_call import MegatronCall
from megatron_pp.integrations.megatron_release import Megatron, load_megatron
from megatron_pp.integrations.megatron_scope import has_modules, reason_not_served, without_defaults
from megatron_pp.integrations.megatron_versions import ENTRIES
from megatron_pp.integrations.named_objects import replace_names
from megatron_pp.integrations.settings import InstallSettings, read_settings
from megatron_pp.on_demand import load
from megatron_pp.runtime.arguments import check_required

__all__ = ["NotServedError", "UnknownMegatronError", "install", "installed", "is_installed", "uninstall"]

logger = logging.getLogger("megatron_pp")

# Whether Megatron's own schedule runs: the schedule functions that it calls by name are Megatron's too then.
_HANDED_BACK: ContextVar[bool] = ContextVar("megatron_pp_handed_back", default=False)


@dataclass
class Plugin:
    """What the installed schedules share: the settings of `install()`, whether one was called, and what was logged."""

    megatron: Megatron
    settings: InstallSettings
    called: bool = False
    logged: set[str] = field(default_factory=set)

    def log_once(self, reason: str) -> None:
        """Log once that Megatron's own schedule runs, and why. Raises NotServedError under `strict`."""
        if self.settings.strict:
            raise NotServedError(
                f"megatron_pp does not serve {reason}; install() without strict=True lets Megatron run it"
            )
        if reason not in self.logged:
            self.logged.add(reason)
            logger.warning("megatron_pp does not serve %s: Megatron-core's own schedule runs instead", reason)


class Schedule:
    """Stands for one of Megatron's schedule functions under its name: called with the same keywords, with the same
    signature, and pickled by name. Without a ``plugin``, for who has kept it after `uninstall()`, it is Megatron's.
    """

    def __init__(self, theirs: Callable[..., Any]) -> None:
        functools.update_wrapper(self, theirs)
        self.theirs = theirs
        self.plugin: Plugin | None = None

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run one step. Returns the reports of the loss function on the last stage, an empty list elsewhere.

        Raises ScheduleInputError before any communication for arguments or a config that cannot be run.
        """
        plugin = self.plugin
        if plugin is None or _HANDED_BACK.get():
            return self.theirs(**arguments)
        plugin.called = True
        name, megatron, settings = self.theirs.__name__, plugin.megatron, plugin.settings
        arguments = without_defaults(self.theirs, megatron.row, arguments)
        reason = reason_not_served(megatron, name, arguments, settings.overrides)
        if reason is not None:
            plugin.log_once(reason)
            return self._hand_back(arguments)
        check_required(name, arguments)
        if has_modules(megatron, arguments):
            return load("megatron_modules").ModulesMegatronCall(megatron, settings, **arguments).run()
        alone = name == "forward_backward_no_pipelining"
        chunked = name == "forward_backward_pipelining_with_interleaving"
        call = MegatronCall(megatron, settings, alone=alone, chunked=chunked, **arguments)
        if not settings.any_microbatch_count:
            call.refuse_slow_count()
        return call.run()

    def takes(self, function: Any, schedules: ModuleType) -> bool:
        """Whether ``function``, under its name in ``schedules``, is Megatron's, for which it stands from now on: a new
        one where the module was loaded again. One that the program has put there is not."""
        if getattr(function, "__globals__", None) is not vars(schedules):
            return False
        functools.update_wrapper(self, function)
        self.theirs = function
        return True

    def _hand_back(self, arguments: Mapping[str, Any]) -> Any:
        token = _HANDED_BACK.set(True)
        try:
            return self.theirs(**arguments)
        finally:
            _HANDED_BACK.reset(token)

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]  # set by update_wrapper

    def __repr__(self) -> str:
        return f"<{self.__qualname__} of megatron_pp>"  # type: ignore[attr-defined]


def install(strict: bool | None = None, *, settings: str | PathLike[str] | None = None, **others: Any) -> None:
    """Make Megatron-core's training loop use this engine, in this process. A second call changes the settings, and
    takes schedules that Megatron's module has anew.

    strict     raise NotServedError where Megatron's own schedule would run
    settings   a TOML file with settings; by default the one that the environment variable MEGATRON_PP_SETTINGS names
    others     settings, such as ``overlap_p2p_comm=True``; docs/megatron.md lists them. None: not given

    A keyword goes before the environment variable MEGATRON_PP_<NAME>, that before the file, and that before the field
    of Megatron's config. Nothing is ever written to the config.

    Raises ConfigError for an unknown name or an impossible value. Raises UnknownMegatronError where megatron-core is
    missing, too old, or has an unknown signature; under `strict` also where its schedules read or call something
    unknown. Raises NotServedError under `strict` where another function has the name of a schedule, or of
    `get_forward_backward_func`, and does not lead there. Nothing is changed then.
    """
    install_with(read_settings(settings, strict=strict, **others))


def install_with(settings: InstallSettings) -> None:
    """`install()` with settings that have been read."""
    current = _current()
    megatron = load_megatron() if current is None else current.megatron
    unknown = megatron.unknown_reads
    if unknown is not None and settings.strict:
        raise UnknownMegatronError(f"{unknown}; install() without strict=True accepts that")
    if unknown is not None and current is None:
        logger.warning(unknown)
    module, plugin = megatron.schedules, current or Plugin(megatron, settings)
    schedules = _stand_ins(module)
    named = [getattr(module, name) for name in ENTRIES]
    in_place = [one for one, function in zip(schedules, named, strict=True) if one.takes(function, module)]
    not_ours = sum(function is not one for one, function in zip(schedules, named, strict=True))
    if len(in_place) < not_ours or _names_differ(module):
        load("other_schedules").check_names(module, schedules, settings.strict)
    plugin.settings = settings
    for one in schedules:
        one.plugin = plugin
    replace_names([(one.theirs, one) for one in in_place])
    fetched = [one.theirs for one in in_place]
    ours = {id(fetched), id(named), *(id(vars(one)) for one in in_place), *map(id, in_place)}
    if fetched and (holders := [holder for holder in gc.get_referrers(*fetched) if id(holder) not in ours]):
        load("other_schedules").name_holders(fetched, holders)
    take_models()


def _names_differ(schedules: ModuleType) -> bool:
    """Whether Megatron's package has another `get_forward_backward_func` than its module."""
    package = sys.modules["megatron.core.pipeline_parallel"]
    return package.get_forward_backward_func is not schedules.get_forward_backward_func


@atexit.register
def _report_unused() -> None:
    plugin = _current()
    if plugin is not None and not plugin.called and _names_differ(plugin.megatron.schedules):
        load("other_schedules").report_unused(plugin.megatron.schedules, _schedules())


def take_models() -> None:
    """Let GPTModels be built for V schedules, if the engine is installed."""
    current = _current()
    if current is not None:
        place_models(current.settings.overrides.get("pipeline_schedule"))


def uninstall() -> None:
    """Restore Megatron-core's own schedules everywhere, where they are replaced."""
    schedules = _schedules()
    if schedules:
        replace_names([(schedule, schedule.theirs) for schedule in schedules])
        for schedule in schedules:
            schedule.plugin = None
        restore_models()


def is_installed() -> bool:
    """Whether Megatron-core's schedules run through this engine."""
    return _current() is not None


@contextmanager
def installed(strict: bool | None = None, **others: Any) -> Iterator[None]:
    """`install()` for a `with` block; restores the state before it."""
    before = _current()
    settings_before = None if before is None else before.settings
    install(strict, **others)
    try:
        yield
    finally:
        if settings_before is None:
            uninstall()
        else:
            install_with(settings_before)


def _current() -> Plugin | None:
    """The installed plug-in."""
    return next((schedule.plugin for schedule in _schedules()), None)


def _schedules() -> list[Schedule]:
    """Those that stand for Megatron's now, under its names or within what the program has put there."""
    module = sys.modules.get("megatron.core.pipeline_parallel.schedules")
    complete = module is not None and all(hasattr(module, name) for name in ENTRIES)
    return [one for one in _stand_ins(module) if one.plugin is not None] if complete else []


@functools.lru_cache(maxsize=1)
def _stand_ins(schedules: ModuleType) -> list[Schedule]:
    """One for each of Megatron's, for as long as the process runs: the program may hold it."""
    return [Schedule(getattr(schedules, name)) for name in ENTRIES]

"""Megatron-core's training loop on this engine: one line, `install()`.

    from megatron_pp.integrations import megatron_core
    megatron_core.install()

Afterwards Megatron's three schedule functions, `forward_backward_no_pipelining` and the two for pipelines, run through
this engine, in every module that has imported them. Megatron's own `get_forward_backward_func` returns them. Models,
optimizers, data-parallel wrappers, configs, process groups and the forward and backward of one microbatch stay
Megatron's. Steps that the engine does not serve run on Megatron's own schedule, with one warning that names the reason;
`install(strict=True)` raises NotServedError instead.
"""

import atexit
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike
from types import ModuleType
from typing import Any

from megatron_pp.common.object_table import ObjectTable
from megatron_pp.errors import NotServedError, UnknownMegatronError
from megatron_pp.integrations.megatron.given import FILE_VARIABLE, InstallSettings, in_environment
from megatron_pp.integrations.megatron.named_objects import holders_of, replace_in, replace_names
from megatron_pp.integrations.megatron.releases.release import Megatron, load_megatron
from megatron_pp.integrations.megatron.releases.versions import ENTRIES
from megatron_pp.integrations.megatron.steps.after_step import leave_what_follows, watch_what_follows
from megatron_pp.integrations.megatron.steps.call import MegatronHost
from megatron_pp.integrations.megatron.steps.gpt_models import has_built_v, model_classes, place_models, restore_models
from megatron_pp.integrations.megatron.steps.scope import has_modules, reason_not_served, without_defaults
from megatron_pp.runtime.arguments import check_required
from megatron_pp.runtime.run_step import prepared, run_step

__all__ = ["NotServedError", "UnknownMegatronError", "install", "installed", "is_installed", "uninstall"]

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
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
    """Replaces one of Megatron's schedule functions under its name. It takes the same keywords, has the same signature,
    and is pickled by name. Without a ``plugin`` it calls Megatron's function, for callers that still hold it after
    `uninstall()`.
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
            if has_built_v():
                from megatron_pp.integrations.megatron.steps import v_step

                v_step.check_handed_back(reason, arguments.get("model"))
            plugin.log_once(reason)
            return self._hand_back(arguments)
        check_required(name, arguments)
        if has_modules(megatron, arguments):
            watch_what_follows()
            from megatron_pp.integrations.megatron.steps import modules_host

            return modules_host.run(megatron, settings, arguments)
        alone = name == "forward_backward_no_pipelining"
        chunked = name == "forward_backward_pipelining_with_interleaving"
        host = MegatronHost(megatron, settings, alone=alone, chunked=chunked, **arguments)
        step = prepared(host)
        host.check(step)
        watch_what_follows()
        return run_step(step, host)

    def stand_for(self, theirs: Callable[..., Any]) -> None:
        """Replace this function of Megatron's instead, for example after its module was loaded again."""
        functools.update_wrapper(self, theirs)
        self.theirs = theirs

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
    """Make Megatron-core's training loop use this engine, in this process. A second call changes the settings. It also
    replaces schedules in modules that were imported or reloaded since the first call.

    strict     raise NotServedError for a step that Megatron's own schedule would run
    settings   a TOML file with settings; by default the one that the environment variable MEGATRON_PP_SETTINGS names
    others     settings, such as ``overlap_p2p_comm=True``; docs/megatron.md lists them. None: not given

    A keyword has precedence over the environment variable MEGATRON_PP_<NAME>, the variable over the file, and the file
    over the field of Megatron's config. Nothing is ever written to the config.

    Raises ConfigError for an unknown name or an impossible value. Raises UnknownMegatronError if megatron-core is
    missing, too old, or has an unknown signature; under `strict` also if its schedules read or call something unknown.
    Under `strict` raises NotServedError if another function has the name of a schedule, or of
    `get_forward_backward_func`, and does not call Megatron's. If it raises, nothing was changed.
    """
    install_with(_given(settings, strict, others))


def _given(file: str | PathLike[str] | None, strict: bool | None, others: Mapping[str, Any]) -> InstallSettings:
    """Raises ConfigError."""
    nothing = file is None and not others and not in_environment(os.environ) and not os.environ.get(FILE_VARIABLE)
    if nothing and (strict is None or isinstance(strict, bool)):
        return InstallSettings(strict=strict is True)
    from megatron_pp.integrations.megatron.settings import read_settings

    return read_settings(file, strict=strict, **others)


def install_with(settings: InstallSettings) -> None:
    """`install()` with settings that have been read."""
    megatron, classes = load_megatron(), model_classes()  # imports come before the lock: one may wait for a thread
    with _CHANGES:
        state = _install(State(megatron, settings), classes)
        if _BLOCKS:
            _BLOCKS[-1].state = state


@dataclass(frozen=True)
class State:
    """What is installed: the settings, and for which modules of Megatron's."""

    megatron: Megatron
    settings: InstallSettings


@dataclass(eq=False)
class Block:
    """A block of `installed()` that has not ended, or the process outside of all blocks. ``state``: None if nothing is
    installed in it."""

    state: State | None


# Process-wide, as Megatron's modules are. The state of the block that began last holds: blocks of several threads, and
# context managers that are closed in another order, end without an effect on those that go on.
_BLOCKS: list[Block] = []
_CHANGES = threading.RLock()

# Those that stand for Megatron's functions -> the names of which module, and which name of them. A program may hold
# one for as long as it runs, also after `uninstall()`.
_STAND_INS: ObjectTable[tuple[dict[str, Any], str]] = ObjectTable()


def _install(state: State, classes: list[type]) -> State:
    """Put the engine in place of Megatron's schedules, after all checks: what raises changes nothing."""
    megatron, settings, current = state.megatron, state.settings, _current()
    if megatron.unknown_reads is not None and settings.strict:
        raise UnknownMegatronError(f"{megatron.unknown_reads}; install() without strict=True accepts that")
    module = megatron.schedules
    schedules = _stand_ins(module)
    named = [getattr(module, name) for name in ENTRIES]
    others = [now for now in named if now not in schedules]
    taken = [now for now in others if _taken_from(now, module) is not None]
    if len(taken) < len(others) or _names_differ(module):
        from megatron_pp.integrations.megatron.releases import other_schedules

        other_schedules.check_names(module, [*schedules, *taken], settings.strict)
    if current is None and (news := [one for one in (megatron.unknown_reads, megatron.changed) if one is not None]):
        logger.warning(". ".join(news))
    place_models(settings.overrides.get("pipeline_schedule"), classes)
    fetched = _put_in(state, schedules)
    space = vars(module)
    known = [space, named, others, taken, *schedules, *map(vars, schedules)]
    if fetched and (holders := holders_of(fetched, known)):
        from megatron_pp.integrations.megatron.releases import other_schedules

        other_schedules.name_holders(fetched, holders)
    return state


def _put_in(state: State, schedules: list[Schedule]) -> list[Any]:
    """Have ``schedules`` stand for Megatron's under all names. Returns the functions that they have replaced."""
    module = state.megatron.schedules
    plugin = next((one.plugin for one in schedules if one.plugin is not None), None)
    plugin = plugin or Plugin(state.megatron, state.settings)
    plugin.megatron, plugin.settings = state.megatron, state.settings
    replaced = []
    for one, name in zip(schedules, ENTRIES, strict=True):
        one.plugin, now = plugin, getattr(module, name)
        if now is not one and (theirs := _taken_from(now, module)) is not None:
            one.stand_for(theirs)
            replaced.append((now, one))
    replace_in(vars(module), replaced)  # which may not be in sys.modules any more
    replace_names(replaced)
    return [now for now, _ in replaced]


def _taken_from(function: Any, module: ModuleType) -> Any:
    """Megatron's own function, where ``function``, under its name in ``module``, is that, or stands for it in a copy of
    this engine that was loaded before; None where the program has put another there."""
    kind = type(function)
    if (kind.__module__, kind.__qualname__) == (__name__, Schedule.__qualname__):
        function = function.theirs
    return function if getattr(function, "__globals__", None) is vars(module) else None


def _take_out(but: dict[str, Any] | None = None) -> None:
    """Restore Megatron's functions under all names, except those of the module with the names ``but``."""
    going = [(one, space) for one, (space, _) in _STAND_INS.items() if one.plugin is not None and space is not but]
    for one, space in going:
        replace_in(space, [(one, one.theirs)])  # of a module that may not be in sys.modules any more
    replace_names([(one, one.theirs) for one, _ in going])
    for one, _ in going:
        one.plugin = None
    if _current() is None:
        leave_what_follows()


def _names_differ(schedules: ModuleType) -> bool:
    """Whether Megatron's package has another `get_forward_backward_func` than its module."""
    package = sys.modules["megatron.core.pipeline_parallel"]
    return package.get_forward_backward_func is not schedules.get_forward_backward_func


@atexit.register
def _report_unused() -> None:
    plugin, module = _current(), sys.modules.get(SCHEDULES)
    if plugin is not None and not plugin.called and _names_differ(plugin.megatron.schedules):
        schedules = plugin.megatron.schedules
        from megatron_pp.integrations.megatron.releases import other_schedules

        other_schedules.report_unused(schedules, _stand_ins(schedules))
    elif plugin is None and module is not None and any(one.plugin is not None for one, _ in _STAND_INS.items()):
        logger.warning(
            "Megatron-core's modules were removed and imported anew after install(): steps since then ran its own "
            "schedules. There, call install() again"
        )


def take_models() -> None:
    """Let Megatron's models be built for V schedules, if the engine is installed."""
    current = _current()
    if current is not None:
        place_models(current.settings.overrides.get("pipeline_schedule"), model_classes())


def uninstall() -> None:
    """Restore Megatron-core's own schedules in every module."""
    with _CHANGES:
        _take_out()
        restore_models()
        if _BLOCKS:
            _BLOCKS[-1].state = None


def is_installed() -> bool:
    """Whether Megatron-core's schedules run through this engine."""
    return _current() is not None


@contextmanager
def installed(strict: bool | None = None, **others: Any) -> Iterator[None]:
    """`install()` for a `with` block. At its end the state before it is restored, whatever was installed or uninstalled
    within. If blocks end in another order, as in several threads, the state of the block that began last holds."""
    state = State(load_megatron(), _given(None, strict, others))
    classes = model_classes()
    with _CHANGES:
        outside = Block(_state())
        block = Block(_install(state, classes))
        if not _BLOCKS:
            _BLOCKS.append(outside)
        _BLOCKS.append(block)
    try:
        yield
    finally:
        with _CHANGES:
            _end(block, classes)


def _end(block: Block, classes: list[type]) -> None:
    holds = _BLOCKS[-1] is block
    _BLOCKS.remove(block)
    state = _BLOCKS[-1].state
    if len(_BLOCKS) == 1:
        _BLOCKS.clear()
    if not holds:
        return
    if state is None:
        _take_out()
        restore_models()
        return
    module = state.megatron.schedules
    _take_out(but=vars(module))
    place_models(state.settings.overrides.get("pipeline_schedule"), classes)
    _put_in(state, _stand_ins(module))  # without checks: they were made when it was installed


def _state() -> State | None:
    current = _current()
    return None if current is None else State(current.megatron, current.settings)


def _current() -> Plugin | None:
    """The plug-in that is installed in Megatron's module of schedules."""
    module = sys.modules.get(SCHEDULES)
    spaces = _STAND_INS.items() if module is not None else []
    return next((one.plugin for one, (space, _) in spaces if one.plugin and space is vars(module)), None)


def _stand_ins(schedules: ModuleType) -> list[Schedule]:
    """One for each of Megatron's in this module; those that the program holds already."""
    space, found = vars(schedules), {}
    for one, (names, name) in _STAND_INS.items():
        if names is space:
            found[name] = one
    for name in ENTRIES:
        if name not in found:
            found[name] = Schedule(getattr(schedules, name))
            _STAND_INS[found[name]] = space, name
    return [found[name] for name in ENTRIES]

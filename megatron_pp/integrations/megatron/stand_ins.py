"""The functions that replace Megatron-core's schedule functions under their names, and run their steps."""

import functools
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_pp import __version__
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.errors import UnknownMegatronError
from megatron_pp.integrations.megatron.given import InstallSettings
from megatron_pp.integrations.megatron.named_objects import holders_of, replace_in, replace_names
from megatron_pp.integrations.megatron.releases.release import Megatron
from megatron_pp.integrations.megatron.releases.versions import ENTRIES
from megatron_pp.integrations.megatron.steps.after_step import watch_what_follows
from megatron_pp.integrations.megatron.steps.call import MegatronHost
from megatron_pp.integrations.megatron.steps.gpt_models import place_models
from megatron_pp.integrations.megatron.steps.served.scope import (
    HANDED_BACK,
    has_modules,
    reason_not_served,
    without_defaults,
)
from megatron_pp.runtime.arguments import check_required
from megatron_pp.runtime.run_step import prepared, run_step

SCHEDULES = "megatron.core.pipeline_parallel.schedules"
logger = logging.getLogger("megatron_pp")


@dataclass
class Plugin:
    """State of the installed schedules: the settings of `install()`, whether one was called, and what was logged."""

    megatron: Megatron
    settings: InstallSettings
    called: bool = False
    logged: set[str] = field(default_factory=set)


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
        if plugin is None or HANDED_BACK.get():
            return self.theirs(**arguments)
        plugin.called = True
        name, megatron, settings = self.theirs.__name__, plugin.megatron, plugin.settings
        arguments = without_defaults(self.theirs, megatron.row, arguments)
        reason = reason_not_served(megatron, name, arguments, settings.overrides)
        if reason is not None:
            from megatron_pp.integrations.megatron.steps import handed_back

            return handed_back.run(self.theirs, arguments, reason, settings.strict, plugin.logged)
        check_required(name, arguments)
        if has_modules(megatron, arguments):
            watch_what_follows()
            from megatron_pp.integrations.megatron.steps import modules_host

            return modules_host.run(megatron, settings, arguments)
        alone = name == "forward_backward_no_pipelining"
        chunked = name == "forward_backward_pipelining_with_interleaving"
        host = MegatronHost(megatron, settings, alone=alone, chunked=chunked, **arguments)
        step = prepared(host)
        watch_what_follows()
        return run_step(step, host)

    def stand_for(self, theirs: Callable[..., Any]) -> None:
        """Replace this function of Megatron's instead, for example after its module was loaded again."""
        functools.update_wrapper(self, theirs)
        self.theirs = theirs

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]  # set by update_wrapper

    def __repr__(self) -> str:
        return f"<{self.__qualname__} of megatron_pp>"  # type: ignore[attr-defined]


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
BLOCKS: list[Block] = []
CHANGES = threading.RLock()

# A function that replaces one of Megatron's -> the names of its module, and its name there. A program may hold such a
# function for as long as it runs, also after `uninstall()`.
STAND_INS: ObjectTable[tuple[dict[str, Any], str]] = ObjectTable()


def put_in_place(state: State, classes: list[type]) -> State:
    """Put the engine in place of Megatron's schedules, after all checks: what raises changes nothing."""
    megatron, settings = state.megatron, state.settings
    if megatron.unknown_reads is not None and settings.strict:
        raise UnknownMegatronError(f"{megatron.unknown_reads}; install() without strict=True accepts that")
    module = megatron.schedules
    schedules = stand_ins(module)
    named = [getattr(module, name) for name in ENTRIES]
    others = [now for now in named if now not in schedules]
    taken = [now for now in others if _taken_from(now, module) is not None]
    if len(taken) < len(others) or names_differ(module):
        from megatron_pp.integrations.megatron.releases import other_schedules

        other_schedules.check_names(module, [*schedules, *taken], settings.strict)
    if current() is None:
        news = [one for one in (megatron.unknown_reads, megatron.changed) if one is not None]
        runs = f"megatron_pp {__version__} runs the pipeline schedules of megatron-core {megatron.version}"
        logger.log(logging.WARNING if news else logging.INFO, ". ".join([runs, *news]))
    place_models(settings.overrides.get("pipeline_schedule"), classes)
    fetched = put_in(state, schedules)
    space = vars(module)
    known = [space, named, others, taken, *schedules, *map(vars, schedules)]
    if fetched and (holders := holders_of(fetched, known)):
        from megatron_pp.integrations.megatron.releases import other_schedules

        other_schedules.name_holders(fetched, holders)
    return state


def put_in(state: State, schedules: list[Schedule]) -> list[Any]:
    """Replace Megatron's functions by ``schedules`` under all names. Returns the functions that were replaced."""
    module = state.megatron.schedules
    plugin = next((one.plugin for one in schedules if one.plugin), None) or Plugin(state.megatron, state.settings)
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
    """Megatron's own function, if ``function`` (under its name in ``module``) is that, or replaces it in a copy of this
    engine that was loaded before. None if the program has put another function there."""
    kind = type(function)
    if (kind.__module__, kind.__qualname__) == (__name__, Schedule.__qualname__):
        function = function.theirs
    return function if getattr(function, "__globals__", None) is vars(module) else None


def names_differ(schedules: ModuleType) -> bool:
    """Whether Megatron's package has another `get_forward_backward_func` than its module."""
    package = sys.modules["megatron.core.pipeline_parallel"]
    return package.get_forward_backward_func is not schedules.get_forward_backward_func


def current() -> Plugin | None:
    """The plug-in that is installed in Megatron's module of schedules."""
    module = sys.modules.get(SCHEDULES)
    spaces = STAND_INS.items() if module is not None else []
    return next((one.plugin for one, (space, _) in spaces if one.plugin and space is vars(module)), None)


def stand_ins(schedules: ModuleType) -> list[Schedule]:
    """One for each of Megatron's in this module; those that the program holds already."""
    space, found = vars(schedules), {}
    for one, (names, name) in STAND_INS.items():
        if names is space:
            found[name] = one
    for name in ENTRIES:
        if name not in found:
            found[name] = Schedule(getattr(schedules, name))
            STAND_INS[found[name]] = space, name
    return [found[name] for name in ENTRIES]

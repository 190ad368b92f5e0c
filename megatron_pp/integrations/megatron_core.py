"""Megatron-core's training loop on this engine: one line, `install()`.

    from megatron_pp.integrations import megatron_core
    megatron_core.install()

Afterwards `megatron.core.pipeline_parallel.get_forward_backward_func`, wherever it has been imported to, returns
schedules that run through this engine. Models, optimizers, data-parallel wrappers, configs, process groups and the
forward and backward of one microbatch stay Megatron's. Megatron's own schedule runs what the engine does not serve,
with one warning that names the reason; `install(strict=True)` raises NotServedError instead.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_pp.errors import NotServedError, UnknownMegatronError
from megatron_pp.integrations.freed_outputs import leave_freed_outputs
from megatron_pp.integrations.megatron_call import MegatronCall
from megatron_pp.integrations.megatron_release import Megatron, load_megatron, reason_not_served
from megatron_pp.integrations.v_placement import install_v, uninstall_v

__all__ = ["NotServedError", "UnknownMegatronError", "install", "installed", "is_installed", "uninstall"]

logger = logging.getLogger("megatron_pp")


class Schedule:
    """Replaces one of Megatron's three schedule functions; called with the same keywords."""

    def __init__(self, theirs: Callable[..., Any], selector: ScheduleSelector) -> None:
        functools.update_wrapper(self, theirs)
        self.theirs = theirs
        self.selector = selector

    def __call__(self, **arguments: Any) -> list[Any]:
        """Run one step. Returns the reports of the loss function on the last stage, an empty list elsewhere.

        Raises ScheduleInputError before any communication for arguments or a config that cannot be run.
        """
        name, reason = self.theirs.__name__, reason_not_served(self.selector.megatron, arguments)
        if reason is not None:
            self.selector.log_once(reason)
            return self.theirs(**arguments)
        alone = name == "forward_backward_no_pipelining"
        chunked = name == "forward_backward_pipelining_with_interleaving"
        return MegatronCall(self.selector.megatron, alone=alone, chunked=chunked, **arguments).run()


class ScheduleSelector:
    """Replaces Megatron's `get_forward_backward_func`; takes the arguments of the installed release's."""

    def __init__(self, original: Callable[..., Any], megatron: Megatron, strict: bool) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.megatron = megatron
        self.strict = strict
        self._logged: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Schedule:
        if not any(value is not None for value in (*args, *kwargs.values())):
            self.megatron.require_initialised()
        return Schedule(self.original(*args, **kwargs), self)

    def log_once(self, reason: str) -> None:
        """Log once that Megatron's own schedule runs, and why. Raises NotServedError under `strict`."""
        if self.strict:
            raise NotServedError(
                f"megatron_pp does not serve {reason}; install() without strict=True lets Megatron run it"
            )
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("megatron_pp does not serve %s: Megatron-core's own schedule runs instead", reason)


def install(strict: bool = False) -> None:
    """Make Megatron-core's training loop use this engine, in this process. A second call only sets `strict`. Raises
    UnknownMegatronError where megatron-core is missing, too old, or has an unknown signature; nothing is changed then.
    """
    current = _current()
    if current is not None:
        current.strict = strict
        return
    megatron = load_megatron()
    original = megatron.schedules.get_forward_backward_func
    _replace(original, ScheduleSelector(original, megatron, strict))
    install_v(_replace)


def uninstall() -> None:
    """Restore Megatron-core's own schedules everywhere, where they are replaced."""
    current = _current()
    if current is not None:
        _replace(current, current.original)
        uninstall_v(_replace)
        leave_freed_outputs(current.megatron.schedules)


def is_installed() -> bool:
    """Whether Megatron-core's schedules run through this engine."""
    return _current() is not None


@contextmanager
def installed(strict: bool = False) -> Iterator[None]:
    """`install()` for a `with` block; restores the state before it."""
    before = _current()
    strict_before = before is not None and before.strict
    install(strict)
    try:
        yield
    finally:
        if before is None:
            uninstall()
        else:
            install(strict_before)


def _current() -> ScheduleSelector | None:
    """The selector that is installed, read from Megatron's own module."""
    schedules = sys.modules.get("megatron.core.pipeline_parallel.schedules")
    selector = getattr(schedules, "get_forward_backward_func", None)
    return selector if isinstance(selector, ScheduleSelector) else None


def _replace(old: Any, new: Any) -> None:
    """Replace `old` by `new` in all imported modules: Megatron's own, and scripts that have imported the name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        for name, value in list(names.items()) if isinstance(names, dict) else []:
            if value is old:
                setattr(module, name, new)

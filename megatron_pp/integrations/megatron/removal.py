"""Undoes `install()`, for `uninstall()` and the end of a block of `installed()`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_pp.integrations.megatron.named_objects import replace_in, replace_names
from megatron_pp.integrations.megatron.stand_ins import (
    BLOCKS,
    CHANGES,
    STAND_INS,
    Block,
    State,
    current,
    put_in,
    put_in_place,
    stand_ins,
)
from megatron_pp.integrations.megatron.steps.after_step import WatchedEnd, WatchedStep, optimizers
from megatron_pp.integrations.megatron.steps.gpt_models import MODELS, USES, PlacedModel, has_built_v, place_models
from megatron_pp.on_demand import load


def uninstall() -> None:
    """Restore Megatron-core's own schedules in every module."""
    with CHANGES:
        _take_out()
        restore_models()
        if BLOCKS:
            BLOCKS[-1].state = None


@contextmanager
def installed(state: State, classes: list[type]) -> Iterator[None]:
    """Have ``state`` installed in a block. ``classes``: of Megatron's models."""
    with CHANGES:
        now = current()
        outside = Block(None if now is None else State(now.megatron, now.settings))
        block = Block(put_in_place(state, classes))
        if not BLOCKS:
            BLOCKS.append(outside)
        BLOCKS.append(block)
    try:
        yield
    finally:
        with CHANGES:
            _end(block, classes)


def _end(block: Block, classes: list[type]) -> None:
    holds = BLOCKS[-1] is block
    BLOCKS.remove(block)
    state = BLOCKS[-1].state
    if len(BLOCKS) == 1:
        BLOCKS.clear()
    if not holds:
        return
    if state is None:
        _take_out()
        restore_models()
        return
    module = state.megatron.schedules
    _take_out(but=vars(module))
    place_models(state.settings.overrides.get("pipeline_schedule"), classes)
    put_in(state, stand_ins(module))  # without checks: they were made when it was installed


def _take_out(but: dict[str, Any] | None = None) -> None:
    """Restore Megatron's functions under all names, except those of the module with the names ``but``."""
    going = [(one, space) for one, (space, _) in STAND_INS.items() if one.plugin is not None and space is not but]
    for one, space in going:
        replace_in(space, [(one, one.theirs)])  # of a module that may not be in sys.modules any more
    replace_names([(one, one.theirs) for one, _ in going])
    for one, _ in going:
        one.plugin = None
    if current() is None:
        leave_what_follows()


def restore_models() -> None:
    """Undo `place_models`."""
    for module, name in MODELS:
        model = getattr(sys.modules.get(module), name, None)
        if model is not None and isinstance(placed := vars(model)["__init__"], PlacedModel):
            model.__init__ = placed.original
    for use, _ in USES.items():
        for built, _ in use.in_v.items() if not use.ended else ():
            load("v_placement").refuse_without_install(built)
        use.ended = True
    if has_built_v():
        load("v_placement").ask_as_before()


def leave_what_follows() -> None:
    """Restore what ``watch_what_follows`` has replaced."""
    for kind in optimizers():
        watched = vars(kind).get("step")
        if isinstance(watched, WatchedStep):
            kind.step = watched.theirs  # type: ignore[attr-defined]
    if isinstance(sys.excepthook, WatchedEnd):
        sys.excepthook = sys.excepthook.theirs

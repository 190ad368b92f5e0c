"""What a call of a schedule function reuses from an earlier one.

Most calls of a program run the same step again, on another batch. What such a call has checked, chosen and looked up is
kept with its model. A later call reads everything that may have changed, compares it with what was read then, and runs.
Of models, functions, groups and communicators there are weak references alone: nothing of the program is kept alive.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.common.log_once import logger
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import StepSettings
from megatron_pp.runtime.arguments import group_sizes, pipeline_group
from megatron_pp.runtime.communicators import KEPT
from megatron_pp.runtime.step import Step
from megatron_pp.runtime.step_features import MODULES_OF_MODELS

if TYPE_CHECKING:
    from megatron_pp.runtime.host import Host

_MOST = 4  # calls of one model: steps of training and evaluation, also with other hooks
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
_NUMBER = StepSettings._fields.index("step_number")
_OF_ONE_CALL = {"inputs", "settings", "number", "weights", "communicator"}  # fields of a Step

_CALLS: ObjectTable[list[Kept]] = ObjectTable()  # by first model chunk; the newest first
os.register_at_fork(after_in_child=_CALLS.emptied)  # their communicators are those of the parent process


class _Same:
    """Equal to one object alone, as long as that lives."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, known: Any) -> None:
        self._known = weakref.ref(known)

    def __eq__(self, other: Any) -> bool:
        return other is not None and self._known() is other


class Read:
    """Values that a call has read. Equal to equal ones of the same types: 1 is neither True nor 1.0. Objects that are
    not plain are equal to themselves, lists to lists of equal elements. Raises TypeError for an object of which there
    is no weak reference."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Iterable[Any]) -> None:
        self._kind = type(values)
        self._values = tuple(map(_weakly, values))
        self._types = tuple(kind if kind in _PLAIN else _Same(kind) for kind in map(type, values))

    def __eq__(self, other: Any) -> bool:
        """Types come first: an array compares its elements, also with None."""
        if type(other) is not self._kind or self._types != tuple(map(type, other)):
            return False
        return self._values == tuple(other)


def _weakly(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    return Read(value) if type(value) in (list, tuple) else _Same(value)


class Kept(NamedTuple):
    """``found``: the fields of the call's Step that are the same in later ones. ``communicator``: None for a rank
    alone, which has one for each call."""

    settings: Read
    others: Read
    shapes: Read
    communicator: weakref.ref[P2PCore] | None
    found: dict[str, Any]


def to_keep(host: Host, step: Step) -> Kept | None:
    """What later calls may reuse of ``step``. It is read before the step runs, because hooks may change what the
    next call reads. None if something has a part in each call: an observer, a feature, a converted model, times that
    were measured, a schedule file, or a function that gives shapes."""
    spec, inputs = step.spec, step.inputs
    parts = step.observers, step.weights, step.microbatch_costs, step.of_rank.has_features, spec.measured, spec.digest
    if not host.keeps_calls or any(parts) or inputs.adjust_tensor_shapes_fn is not None or _has_models_of_features():
        return None
    group = pipeline_group(inputs, host.alone)
    if group is not step.communicator.pp_group:  # one rank of a pipeline, without the others
        return None
    known, settings = _CALLS.get(inputs.chunks[0]) or (), _compared(step.settings)
    others, shapes = _others(host, step.settings, group), host.shapes_compared(step.settings, group)
    try:
        read = next((one.settings for one in known if one.settings == settings), None) or Read(settings)
        compared = read, Read(others), Read(shapes)
    except TypeError:
        return None
    communicator = None if group is None else weakref.ref(step.communicator)
    found = {name: value for name, value in vars(step).items() if name not in _OF_ONE_CALL} | {"is_known": True}
    return Kept(*compared, communicator, found)


def keep(model: Any, call: Kept) -> None:
    """Keep ``call``, whose step has run, for later calls. ``model``: its first chunk."""
    _CALLS[model] = [call, *(_CALLS.get(model) or ())[: _MOST - 1]]


def taken_over(host: Host, settings: StepSettings) -> Step | None:
    """The step of a call, if an earlier one has read the same; else None."""
    inputs, compared = host.inputs, _compared(settings)
    same = [one for one in _CALLS.get(inputs.chunks[0]) or () if one.settings == compared]
    if not same or not host.keeps_calls or inputs.adjust_tensor_shapes_fn is not None or _has_models_of_features():
        return None
    if host.weight_store(settings) is not None:
        return None
    group = pipeline_group(inputs, host.alone)
    others = _others(host, settings, group)
    same = [one for one in same if one.others == others]
    shapes = host.shapes_compared(settings, group) if same else ()  # of lengths that an earlier call has checked
    kept = next((one for one in same if one.shapes == shapes), None)
    communicator = None if kept is None else _communicator_of(kept, host, settings, group)
    if kept is None or communicator is None:
        return None
    number = host.step_number(settings)
    return Step(inputs=inputs, settings=settings, number=number, weights=None, communicator=communicator, **kept.found)


def _compared(settings: StepSettings) -> tuple[Any, ...]:
    """The settings without the step's number, which may differ in each call, and is checked in each."""
    return settings[:_NUMBER] + settings[_NUMBER + 1 :]


def _others(host: Host, settings: StepSettings, group: Any) -> tuple[Any, ...]:
    """The values on which a step depends besides its settings."""
    inputs = host.inputs
    return (
        type(host),
        host.alone,
        inputs.chunked,
        inputs.num_microbatches,
        inputs.forward_only,
        *group_sizes(inputs.pg_collection, settings),
        group,
        getattr(settings.timers, "_log_level", 0),
        logger.isEnabledFor(logging.INFO),  # then plans are logged
        *host.compared(settings, group),
        *inputs.chunks,
    )


def _has_models_of_features() -> bool:
    """Whether the program has made layers of a feature, which takes part in each step of theirs."""
    return any(name in sys.modules for name in MODULES_OF_MODELS)


def _communicator_of(kept: Kept, host: Host, settings: StepSettings, group: Any) -> P2PCore | None:
    """The communicator of the pipeline; None where that is another one now, one of its group has failed, or a group has
    been destroyed, whose communicators the call then closes."""
    if kept.communicator is None:
        from megatron_pp.runtime.alone import lone_communicator

        return lone_communicator(settings, host.inputs.chunks[0])
    found, given = kept.communicator(), host.inputs.p2p_communicator
    if isinstance(given, P2PCore):
        return found if found is given else None
    known = [(whose, one) for whose, made in KEPT.items() for one in list(made.values())]
    if any(one.transport.is_gone() or (whose is group and one.closed) for whose, one in known):
        return None
    return found if any(one is found for _, one in known) else None

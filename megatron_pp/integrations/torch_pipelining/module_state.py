"""Runs a forward that leaves a module unchanged, because the forward that finds shapes is not part of training."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
Undo = Callable[[], None]


@contextmanager
def unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """A context for forwards of ``module``. At its end these are as before: parameters and buffers; all other
    attributes of the modules, with the content of their lists, dicts, sets and dataclasses; the random states of torch,
    Python and NumPy; and autocast's copies of weights.

    It holds a copy of all parameters and buffers, because a forward may write to them past their version counters.
    Changes elsewhere, such as in a closure, are not undone."""
    undo = [*_random_states(), *_attributes(module)]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        with torch.no_grad():
            for one in reversed(undo):
                one()
        torch.clear_autocast_cache()


def _random_states() -> Iterator[Undo]:
    python = random.getstate()
    yield lambda: random.setstate(python)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        state = numpy.get_state()
        yield lambda: numpy.set_state(state)


def _attributes(module: nn.Module) -> Iterator[Undo]:
    seen: set[int] = set()
    sharded = any(isinstance(one, FSDPModule) for one in module.modules())
    for one in module.modules():
        seen |= {id(vars(one)), id(one._modules), id(one._parameters)}
        # FSDP2 exchanges parameters and keeps track of them itself.
        parameters = [] if sharded else [_contents(one._parameters)]
        for undo in (_own(one), _contents(one._modules), *parameters):
            yield _unless_another_class(one, undo)
        held = [*one._parameters.values(), *(v for k, v in vars(one).items() if k not in ("_parameters", "_modules"))]
        for value in held:
            yield from (_unless_another_class(one, undo) for undo in _inside(value, seen))


def _unless_another_class(module: nn.Module, undo: Undo) -> Undo:
    """``undo``, unless the class has changed: a lazy layer becomes another class in its first forward, for good."""
    kind = type(module)

    def checked() -> None:
        if type(module) is kind:
            undo()

    return checked


def _own(module: nn.Module) -> Undo:
    before = dict(vars(module))

    def restore() -> None:
        now = vars(module)
        for name in [name for name in now if name not in before]:
            del now[name]
        now.update(before)

    return restore


def _inside(value: Any, seen: set[int]) -> Iterator[Undo]:
    """The calls that undo changes within ``value``, which keeps its place."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        wraps_others: bool = is_traceable_wrapper_subclass(value)
        if not (wraps_others or isinstance(value, DTensor) or is_lazy(value)):
            yield _tensor(value)
    elif isinstance(value, torch.Generator):
        yield partial(_set_generator, value, value.get_state())
    elif isinstance(value, random.Random):
        drawn = value.getstate()
        yield lambda: value.setstate(drawn)
    elif type(value) in _CONTAINERS or isinstance(value, tuple):
        if not isinstance(value, tuple):
            yield _contents(value)
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _inside(item, seen)
    elif isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        fields = getattr(value, "__dict__", None)
        if fields is not None:
            yield _contents(fields)
            yield from _inside_all(fields, seen)


def _set_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _inside_all(fields: dict[str, Any], seen: set[int]) -> Iterator[Undo]:
    for value in list(fields.values()):
        yield from _inside(value, seen)


def _contents(container: Any) -> Undo:
    before = container.copy()

    def restore() -> None:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)

    return restore


def _tensor(tensor: Tensor) -> Undo:
    """Restores the values of ``tensor`` in its own memory, without a change of its version counter."""
    own = tensor.data
    values = own.clone()

    def restore() -> None:
        if tensor.data_ptr() != own.data_ptr() or tensor.shape != own.shape:
            tensor.data = own
        own.copy_(values)

    return restore

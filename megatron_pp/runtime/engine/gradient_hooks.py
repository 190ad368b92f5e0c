"""Megatron's data-parallel hooks within a step, as the config names them: no_sync, param_sync and grad_sync."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from megatron_pp.config.settings import StepSettings


class SyncHooks:
    """Opens and closes ``no_sync`` and calls the sync functions at the places where the plan has its marks.

    ``config.no_sync_func`` is a function that returns a context manager, or a list of them; without one, the
    ``no_sync`` of chunks that are torch DistributedDataParallel is used. ``grad_sync_func`` and ``param_sync_func``
    take a chunk's parameters: one function or one per chunk.

    ``pipelined``: forwards and backwards do not simply alternate. Then a DistributedDataParallel that looks for unused
    parameters or assumes a static graph raises ScheduleInputError: both options watch the forward before each backward,
    and in a pipeline that is the forward of another microbatch.

    ``reenters_before``: from this position of the program on, no_sync is not entered again once it was left."""

    def __init__(
        self, settings: StepSettings, chunks: Sequence[Any], pipelined: bool = True, reenters_before: float = math.inf
    ) -> None:
        self.chunks = chunks
        self.reenters_before = reenters_before
        self._unprepared = dict(enumerate(chunks)) if pipelined else {}
        for number, chunk in self._unprepared.items():
            if isinstance(chunk, DistributedDataParallel):
                from megatron_pp.runtime.engine import torch_wrappers

                torch_wrappers.check_follows_pipelines(number, chunk)
        self._no_sync = _no_sync_functions(settings.no_sync_func, chunks)
        self._grad_sync = _per_chunk(settings.grad_sync_func, chunks)
        self._param_sync = _per_chunk(settings.param_sync_func, chunks)
        self._closed: AbstractContextManager[Any] | None = None

    def disable_grad_sync(self, position: int = -1) -> None:
        """Enter no_sync: gradients only accumulate. Nothing happens when already inside."""
        if self._closed is None and self._no_sync and position < self.reenters_before:
            stack = ExitStack()
            for function in self._no_sync:
                stack.enter_context(function())
            self._closed = stack

    def enable_grad_sync(self, chunk: int | None = None) -> None:
        """Leave no_sync: data-parallel hooks fire in the backwards of ``chunk`` that follow."""
        if self._closed is not None:
            closed, self._closed = self._closed, None
            closed.__exit__(None, None, None)
        wrapper = None if chunk is None else self._unprepared.pop(chunk, None)
        if isinstance(wrapper, DistributedDataParallel):
            from megatron_pp.runtime.engine import torch_wrappers

            torch_wrappers.expect_gradients(wrapper)

    def grad_sync(self, chunk: int, position: int = -1) -> None:
        if self._grad_sync is not None:
            self.enable_grad_sync()
            self._grad_sync[chunk](self.chunks[chunk].parameters())
            self.disable_grad_sync(position)

    def param_sync(self, chunk: int) -> None:
        if self._param_sync is not None:
            self._param_sync[chunk](self.chunks[chunk].parameters())


def _no_sync_functions(given: Any, chunks: Sequence[Any]) -> list[Callable[[], AbstractContextManager[Any]]]:
    if given is None:
        return [c.no_sync for c in chunks if isinstance(c, DistributedDataParallel)]
    functions = given if isinstance(given, (list, tuple)) else [given]
    return [f for f in functions if f is not nullcontext]


def _per_chunk(given: Any, chunks: Sequence[Any]) -> Sequence[Callable[[Any], None]] | None:
    return given if given is None or isinstance(given, (list, tuple)) else [given] * len(chunks)

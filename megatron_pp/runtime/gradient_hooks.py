"""Megatron's data-parallel hooks, as the config names them: no_sync, param_sync, grad_sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError


class SyncHooks:
    """Opens and closes ``no_sync`` and calls the sync functions at the places where the plan has its marks.

    ``config.no_sync_func`` is a function that returns a context manager, or a list of them; without one, the
    ``no_sync`` of chunks that are torch DistributedDataParallel is used. ``grad_sync_func`` and ``param_sync_func``
    take a chunk's parameters: one function or one per chunk.

    ``pipelined`` says that forwards and backwards do not simply alternate. Raises ScheduleInputError then for a
    DistributedDataParallel that looks for unused parameters or assumes a static graph: both watch the forward before
    each backward, which in a pipeline is another microbatch's.
    """

    def __init__(self, settings: StepSettings, chunks: Sequence[Any], pipelined: bool = True) -> None:
        self._chunks = chunks
        self._unprepared = dict(enumerate(chunks)) if pipelined else {}
        if pipelined:
            _check_wrappers(chunks)
        self._no_sync = _no_sync_functions(settings.no_sync_func, chunks)
        self._grad_sync = _per_chunk(settings.grad_sync_func, chunks)
        self._param_sync = _per_chunk(settings.param_sync_func, chunks)
        self._closed: AbstractContextManager[Any] | None = None

    def disable_grad_sync(self) -> None:
        """Enter no_sync: gradients only accumulate. Nothing happens when already inside."""
        if self._closed is None and self._no_sync:
            stack = ExitStack()
            for function in self._no_sync:
                stack.enter_context(function())
            self._closed = stack

    def enable_grad_sync(self, chunk: int | None = None) -> None:
        """Leave no_sync: data-parallel hooks fire in the backwards that follow, which are ``chunk``'s."""
        if self._closed is not None:
            closed, self._closed = self._closed, None
            closed.__exit__(None, None, None)
        if chunk is not None:
            self._prepare(chunk)

    def _prepare(self, chunk: int) -> None:
        """Tell torch's DistributedDataParallel, once a step, that the gradients to reduce come now.

        By itself it expects them after the last forward outside of no_sync, and ignores them else: the gradients of a
        pipeline would stay local.
        """
        wrapper = self._unprepared.pop(chunk, None)
        if isinstance(wrapper, DistributedDataParallel):
            wrapper.reducer.prepare_for_backward([])

    def grad_sync(self, chunk: int) -> None:
        if self._grad_sync is not None:
            self.enable_grad_sync()
            self._grad_sync[chunk](self._chunks[chunk].parameters())
            self.disable_grad_sync()

    def param_sync(self, chunk: int) -> None:
        if self._param_sync is not None:
            self._param_sync[chunk](self._chunks[chunk].parameters())


def _check_wrappers(chunks: Sequence[Any]) -> None:
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, DistributedDataParallel):
            continue
        for option in ("find_unused_parameters", "static_graph"):
            if getattr(chunk, option, False):
                raise ScheduleInputError(
                    f"model chunk {number} is wrapped as DistributedDataParallel({option}=True), which cannot follow "
                    f"a pipeline; wrap it with {option}=False"
                )


def _no_sync_functions(given: Any, chunks: Sequence[Any]) -> list[Callable[[], AbstractContextManager[Any]]]:
    if given is None:
        return [c.no_sync for c in chunks if isinstance(c, DistributedDataParallel)]
    functions = list(given) if isinstance(given, (list, tuple)) else [given]
    return [f for f in functions if f is not nullcontext]


def _per_chunk(given: Any, chunks: Sequence[Any]) -> list[Callable[[Any], None]] | None:
    if given is None:
        return None
    return list(given) if isinstance(given, (list, tuple)) else [given] * len(chunks)

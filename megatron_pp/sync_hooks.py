"""Megatron's data-parallel hooks, as the config names them: no_sync, param_sync, grad_sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch


class SyncHooks:
    """Opens and closes ``no_sync`` and calls the sync functions at the places where the plan has its marks.

    ``config.no_sync_func`` is a function that returns a context manager, or a list of them; without one, the
    ``no_sync`` of chunks that are torch DistributedDataParallel is used. ``grad_sync_func`` and ``param_sync_func``
    take a chunk's parameters: one function or one per chunk.
    """

    def __init__(self, config: Any, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._no_sync = _no_sync_functions(getattr(config, "no_sync_func", None), chunks)
        self._grad_sync = _per_chunk(getattr(config, "grad_sync_func", None), chunks)
        self._param_sync = _per_chunk(getattr(config, "param_sync_func", None), chunks)
        self._closed: AbstractContextManager[Any] | None = None

    def disable_grad_sync(self) -> None:
        """Enter no_sync: gradients only accumulate. Nothing happens when already inside."""
        if self._closed is None and self._no_sync:
            stack = ExitStack()
            for function in self._no_sync:
                stack.enter_context(function())
            self._closed = stack

    def enable_grad_sync(self) -> None:
        """Leave no_sync: data-parallel hooks fire in the backwards that follow."""
        if self._closed is not None:
            closed, self._closed = self._closed, None
            closed.__exit__(None, None, None)

    def grad_sync(self, chunk: int) -> None:
        if self._grad_sync is not None:
            self.enable_grad_sync()
            self._grad_sync[chunk](self._chunks[chunk].parameters())
            self.disable_grad_sync()

    def param_sync(self, chunk: int) -> None:
        if self._param_sync is not None:
            self._param_sync[chunk](self._chunks[chunk].parameters())


def _no_sync_functions(given: Any, chunks: Sequence[Any]) -> list[Callable[[], AbstractContextManager[Any]]]:
    if given is None:
        return [c.no_sync for c in chunks if isinstance(c, torch.nn.parallel.DistributedDataParallel)]
    functions = list(given) if isinstance(given, (list, tuple)) else [given]
    return [f for f in functions if f is not nullcontext]


def _per_chunk(given: Any, chunks: Sequence[Any]) -> list[Callable[[Any], None]] | None:
    if given is None:
        return None
    return list(given) if isinstance(given, (list, tuple)) else [given] * len(chunks)

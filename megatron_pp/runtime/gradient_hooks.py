"""Megatron's data-parallel hooks, as the config names them: no_sync, param_sync, grad_sync and finalize_model_grads."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from megatron_pp.comm import own_groups
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.ir.placement import Placement


class SyncHooks:
    """Opens and closes ``no_sync`` and calls the sync functions at the places where the plan has its marks.

    ``config.no_sync_func`` is a function that returns a context manager, or a list of them; without one, the
    ``no_sync`` of chunks that are torch DistributedDataParallel is used. ``grad_sync_func`` and ``param_sync_func``
    take a chunk's parameters: one function or one per chunk.

    ``pipelined``: forwards and backwards do not simply alternate. Raises ScheduleInputError then for a
    DistributedDataParallel that looks for unused parameters or assumes a static graph: both watch the forward before
    each backward, which in a pipeline is another microbatch's.

    ``reenters_before``: no_sync, once left, is not entered again at this position of the program or later."""

    def __init__(
        self, settings: StepSettings, chunks: Sequence[Any], pipelined: bool = True, reenters_before: float = math.inf
    ) -> None:
        self.chunks = chunks
        self.reenters_before = reenters_before
        self._unprepared = dict(enumerate(chunks)) if pipelined else {}
        for number, chunk in self._unprepared.items():
            if isinstance(chunk, DistributedDataParallel):
                _check_follows_pipelines(number, chunk)
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
        """Leave no_sync: data-parallel hooks fire in the backwards that follow, which are ``chunk``'s."""
        if self._closed is not None:
            closed, self._closed = self._closed, None
            closed.__exit__(None, None, None)
        wrapper = None if chunk is None else self._unprepared.pop(chunk, None)
        if isinstance(wrapper, DistributedDataParallel):
            # torch expects the gradients to reduce after the last forward outside of no_sync, and ignores others: those
            # of a pipeline would stay local.
            wrapper.reducer.prepare_for_backward([])

    def grad_sync(self, chunk: int, position: int = -1) -> None:
        if self._grad_sync is not None:
            self.enable_grad_sync()
            self._grad_sync[chunk](self.chunks[chunk].parameters())
            self.disable_grad_sync(position)

    def param_sync(self, chunk: int) -> None:
        if self._param_sync is not None:
            self._param_sync[chunk](self.chunks[chunk].parameters())


def finalize_gradients(
    settings: StepSettings,
    chunks: Sequence[Any],
    num_tokens: Any,
    device: torch.device,
    pg_collection: Any,
    force_all_reduce: bool,
) -> None:
    """After the last instruction: finish the embedding's deferred weight gradients, then call
    ``config.finalize_model_grads_func`` with the keywords that it takes (Megatron's order, Megatron-LM#1012)."""
    if settings.defer_embedding_wgrad_compute:
        from megatron_pp.runtime import deferred_embedding

        deferred_embedding.finish_embedding(chunks)
    finalize = settings.finalize_model_grads_func
    if finalize is None:
        return
    tokens = None
    if settings.calculate_per_token_loss:
        tokens = torch.as_tensor(num_tokens, dtype=torch.int, device=device)
    known = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    accepted = _keywords_of(finalize)
    finalize(list(chunks), tokens, **{k: v for k, v in known.items() if accepted is None or k in accepted})


def _check_follows_pipelines(number: int, chunk: DistributedDataParallel) -> None:
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(chunk, option, False):
            raise ScheduleInputError(
                f"model chunk {number} is wrapped as DistributedDataParallel({option}=True), which cannot follow "
                f"a pipeline; wrap it with {option}=False"
            )


def _no_sync_functions(given: Any, chunks: Sequence[Any]) -> list[Callable[[], AbstractContextManager[Any]]]:
    if given is None:
        return [c.no_sync for c in chunks if isinstance(c, DistributedDataParallel)]
    functions = given if isinstance(given, (list, tuple)) else [given]
    return [f for f in functions if f is not nullcontext]


def _per_chunk(given: Any, chunks: Sequence[Any]) -> Sequence[Callable[[Any], None]] | None:
    return given if given is None or isinstance(given, (list, tuple)) else [given] * len(chunks)


def _keywords_of(function: Any) -> frozenset[str] | None:
    """The keyword names that ``function`` takes; None for any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


_SEEN: ObjectTable[bool] = ObjectTable()  # first chunks of the models that have been looked at

# What wrappers that reduce gradients have: torch's and Megatron's DistributedDataParallel and FSDP.
_REDUCING = ("no_sync", "set_requires_gradient_sync")
# How a weight that the embedding and the output layer share is marked: Megatron's names.
_TIED_MODULE, _TIED_PARAMETER = "share_embeddings_and_output_weights", "shared_embedding"


def unsynchronised(
    settings: StepSettings, chunks: Sequence[Any], placement: Placement, pp_group: Any, pg_collection: Any
) -> Iterator[str]:
    """A sentence each for data-parallel replicas and for tied embeddings whose gradients nothing synchronises; nothing
    from the second step of a model on. Both are for warnings, not errors: a program may reduce gradients itself after
    the step."""
    known = isinstance(chunks[0], torch.nn.Module) and not _SEEN.get(chunks[0])
    if settings.finalize_model_grads_func is not None or not known:
        return
    _SEEN[chunks[0]] = True
    replicas = _replicas(pp_group, pg_collection)
    if replicas > 1 and settings.grad_sync_func is None and not all(map(_reduces, chunks)):
        yield (
            f"nothing averages the gradients of the {replicas} data-parallel replicas: the model is not wrapped in "
            "DistributedDataParallel or FSDP, and the config has neither finalize_model_grads_func nor grad_sync_func; "
            "unless the program averages them after the step, replicas diverge: set one of them, as in "
            "docs/recipes/library.md, 'Data parallelism'"
        )
    first, last = placement.homes[0][0], placement.homes[-1][0]
    if first != last and any(map(_is_tied, chunks)):
        yield (
            f"nothing sums the gradients of the embedding weight that pipeline ranks {first} and {last} share: the "
            "config has no finalize_model_grads_func; unless the program sums them after the step, the two copies "
            "diverge: set it, as in docs/recipes/library.md, 'Tied embeddings'"
        )


def _replicas(pp_group: Any, pg_collection: Any) -> int:
    """The size of the data-parallel group, or 1 where it is not known: the caller's, or that of ``parallel_state``
    where the pipeline is its own."""
    for kind in ("dp_cp", "dp"):
        group = getattr(pg_collection, kind, None)
        if group is not None:
            return group.size()
    known = own_groups.model_parallel_is_initialized() and pp_group is own_groups.group_of("pp")
    return own_groups.size_of("dp_cp") if known else 1


def _reduces(chunk: Any) -> bool:
    """Whether the chunk, or a layer of it, is in a wrapper that reduces gradients."""
    return any(hasattr(module, name) for module in _modules(chunk) for name in _REDUCING)


def _is_tied(chunk: Any) -> bool:
    modules = list(_modules(chunk))
    parameters = (parameter for module in modules for parameter in module.parameters(recurse=False))
    return any(getattr(module, _TIED_MODULE, False) for module in modules) or any(
        getattr(parameter, _TIED_PARAMETER, False) for parameter in parameters
    )


def _modules(chunk: Any) -> Iterator[torch.nn.Module]:
    return chunk.modules() if isinstance(chunk, torch.nn.Module) else iter(())

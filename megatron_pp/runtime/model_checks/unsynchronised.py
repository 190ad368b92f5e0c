"""Warnings of gradients that nothing synchronises, for programs without ``config.finalize_model_grads_func``."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_pp.comm import own_groups
from megatron_pp.common.object_table import ObjectTable
from megatron_pp.config.settings import StepSettings
from megatron_pp.plan.ir.placement import Placement

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

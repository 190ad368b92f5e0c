"""Which of Megatron's steps the engine does not serve, in words. Those are handed back to Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_pp.integrations.megatron_release import Megatron
from megatron_pp.module_attributes import wrapped_attribute


def reason_not_served(megatron: Megatron, arguments: Mapping[str, Any]) -> str | None:
    """Why a call of a schedule is Megatron's own to run, as the object of "does not serve ..."; None where it is ours.

    arguments   the keywords of one call of a schedule
    """
    model = arguments.get("model")
    first = model[0] if isinstance(model, (list, tuple)) and model else model
    config = wrapped_attribute(first, "config")
    return _several_modules(megatron, arguments) or _own_loops(config, bool(arguments.get("forward_only", False)))


def _several_modules(megatron: Megatron, arguments: Mapping[str, Any]) -> str | None:
    groups, communicator = arguments.get(megatron.row.groups_keyword), arguments.get("p2p_communicator")
    kinds = [type(groups).__name__, type(communicator).__name__]
    if "MultiModuleProcessGroupCollection" in kinds or "MultiModulePipelineCommunicator" in kinds:
        return "pipelines of several modules (a multi-module process group collection or communicator was given)"
    return None


def _own_loops(config: Any, forward_only: bool) -> str | None:
    if getattr(config, "overlap_moe_expert_parallel_comm", False) and not forward_only:
        return "the combined 1F1B that hides MoE's all-to-all (config.overlap_moe_expert_parallel_comm)"
    if getattr(config, "hybrid_context_parallel", False):
        return "hybrid context parallelism (config.hybrid_context_parallel)"
    if _captures_whole_step(config):
        return "CUDA graphs of a whole iteration (config.cuda_graph_impl, config.cuda_graph_scope)"
    return None


def _captures_whole_step(config: Any) -> bool:
    """Releases ask for it in three ways: a field of its own; a scope (a string, an enum, or a list of them); a kind."""
    kind, scope = getattr(config, "cuda_graph_impl", None), getattr(config, "cuda_graph_scope", None)
    if kind == "full_iteration":
        return True
    if kind != "local" and not getattr(config, "enable_cuda_graph", False):
        return False
    scopes = scope if isinstance(scope, (list, tuple, set)) else [scope]
    return any(getattr(s, "name", s) == "full_iteration" for s in scopes)

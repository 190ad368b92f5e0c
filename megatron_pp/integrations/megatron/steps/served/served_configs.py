"""Which settings of Megatron-core's leave a step to Megatron's own schedule. `install()` asks for each step, and
`megatron-pp check` before a job.
"""

from typing import Any

COMBINED_1F1B = "combined_1f1b"  # the schedule of Megatron's combined steps, under our name


def unserved_setting(config: Any, use_megatron_fsdp: bool = False, forward_only: bool = False) -> str | None:
    """Why Megatron's own schedule runs a step with these settings, whatever the release, as the object of "does not
    serve ..."; None where the engine runs it. ``config``: the model's, or arguments of the same names. Raises
    ScheduleInputError for what no schedule of Megatron's runs either.
    """
    if use_megatron_fsdp and is_combined(config, forward_only):
        return "the combined 1F1B with Megatron-FSDP (config.overlap_moe_expert_parallel_comm, --use-megatron-fsdp)"
    if getattr(config, "hybrid_context_parallel", False):
        from megatron_pp.integrations.megatron.steps.served import hybrid_context

        return hybrid_context.reason_not_served(config)
    if getattr(config, "use_ring_exchange_p2p", False):
        return "the exchange of a custom-built torch (config.use_ring_exchange_p2p)"
    if _captures_whole_step(config):
        return "CUDA graphs of a whole iteration (config.cuda_graph_impl, config.cuda_graph_scope)"
    return None


def is_combined(config: Any, forward_only: bool) -> bool:
    """Whether Megatron runs such a step by schedule plans, which it does in training only."""
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False)) and not forward_only


def _captures_whole_step(config: Any) -> bool:
    """Releases ask for this by a field of its own, a scope (a string, an enum, or a list of them), or a kind."""
    kind, scope = getattr(config, "cuda_graph_impl", None), getattr(config, "cuda_graph_scope", None)
    if kind == "full_iteration":
        return True
    if kind != "local" and not getattr(config, "enable_cuda_graph", False):
        return False
    scopes = scope if isinstance(scope, (list, tuple, set)) else [scope]
    return any(getattr(s, "name", s) == "full_iteration" for s in scopes)

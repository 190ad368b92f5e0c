"""The names that Megatron-core's own schedule functions read and call, as known for each release.

The plug-in replaces these functions. If a newer release reads a new config field or calls a new hook in them, the
plug-in would ignore it without a word. So if a function's source is not that of a known release (`sources.py`),
`install()` reads the source and names what is not in this table. For `forward_step` and `backward_step` there are
digests, too. The releases that were read are those of `sources.py`.

`scripts/megatron_reads.py` prints what a checkout has beyond the table.
"""

import ast
import builtins
import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from megatron_pp.integrations.megatron.releases.versions import COMMUNICATOR, ENTRIES

EVERY = "every schedule function"

# Function or class -> the first release (major, minor) that uses the names -> the names, as `names_read` writes them.
KNOWN: dict[str, dict[tuple[int, int], str]] = {
    EVERY: {
        (0, 14): """
            config.barrier_with_L1_time config.calculate_per_token_loss config.cuda_graph_scope config.enable_cuda_graph
            config.finalize_model_grads_func config.finalize_model_grads_func(grad_finalize_pgs=) config.no_sync_func
            config.timers config.timers(log_level=) GradFinalizeProcessGroups backward_step check_first_val_step
            contextlib create_cudagraphs forward_step forward_step(current_microbatch=)
            forward_step(is_first_microbatch=) get_model_config get_model_type parallel_state torch .cp .dp_cp .embd
            .get_context_parallel_group .get_data_parallel_group .get_embedding_group .get_pipeline_model_parallel_group
            .get_position_embedding_group .get_tensor_model_parallel_group .int .nullcontext .pos_embd .pp .size .start
            .stop .tp .zeros
        """,
        (0, 15): "config.cuda_graph_impl config.finalize_model_grads_func(pg_collection=) ProcessGroupCollection",
        (0, 16): """
            config.finalize_model_grads_func(force_all_reduce=) config.fine_grained_activation_offloading CudaGraphScope
            off_interface .full_iteration .reset
        """,
        (0, 18): """
            config.moe_paged_stash paged_stash_reset paged_stash_reset(config=) paged_stash_reset(enabled=)
            .get_tensor_and_data_parallel_group .tp_dp_cp
        """,
        (0, 19): "_build_default_pg_collection",
        (0, 20): "_reset_activation_offload",
    },
    "forward_backward_no_pipelining": {
        (0, 14): "config.overlap_moe_expert_parallel_comm combined_1f1b_schedule_for_no_pipelining partial",
        (0, 16): "config.hybrid_context_parallel hybrid_context_parallel_forward_backward",
        (0, 18): ".ddp_config .overlap_param_gather .synchronize_param_gather .use_megatron_fsdp",
    },
    "forward_backward_pipelining_without_interleaving": {
        (0, 14): """
            config.deallocate_pipeline_outputs config.grad_sync_func
            config.num_microbatches_with_partial_activation_checkpoints config.overlap_p2p_comm ModelType
            P2PCommunicator P2PCommunicator(config=) P2PCommunicator(pp_group=)
            backward_step(pipeline_model_parallel_size=) clear_embedding_activation_buffer deallocate_output_tensor
            finish_embedding_wgrad_compute forward_step(checkpoint_activations_microbatch=)
            forward_step(collect_non_loss_data=) forward_step(cp_group_size=) forward_step(is_last_stage=)
            get_tensor_shapes get_tensor_shapes(config=) get_tensor_shapes(cp_group=)
            get_tensor_shapes(decoder_seq_length=) get_tensor_shapes(micro_batch_size=) get_tensor_shapes(seq_length=)
            get_tensor_shapes(tp_group=) is_pp_first_stage is_pp_last_stage .__enter__ .__exit__ .config
            .encoder_and_decoder .parameters .pp_group .rank .recv_backward .recv_forward .send_backward
            .send_backward_recv_forward .send_forward .send_forward_recv_backward
        """,
        (0, 17): """
            config.variable_seq_lengths MultiModulePipelineCommunicator MultiModuleProcessGroupCollection
            backward_step_multimodule partial partial(language_model_module_name=) .current_stage
            .get_language_model_cp_size .has_language_model .is_pp_first_stage .is_pp_last_stage
            .language_model_module_name .total_stages
        """,
        (0, 19): "get_tensor_shapes(is_recv=) get_tensor_shapes(pp_group=)",  # the branch dev
        (0, 20): ".is_module_pp_first_stage .rank_module_map",
    },
    "forward_backward_pipelining_with_interleaving": {
        (0, 14): """
            config.batch_p2p_comm config.deallocate_pipeline_outputs config.grad_sync_func config.hidden_size
            config.microbatch_group_size_per_vp_stage config.num_microbatches_with_partial_activation_checkpoints
            config.overlap_moe_expert_parallel_comm config.overlap_p2p_comm config.overlap_p2p_comm_warmup_flush
            config.param_sync_func config.sequence_parallel config.virtual_pipeline_model_parallel_size ModelType
            P2PCommunicator P2PCommunicator(config=) P2PCommunicator(pp_group=)
            backward_step(pipeline_model_parallel_size=) clear_embedding_activation_buffer
            combined_1f1b_schedule_for_interleaved_pipelining
            combined_1f1b_schedule_for_interleaved_pipelining(b_virtual_microbatch_id=)
            combined_1f1b_schedule_for_interleaved_pipelining(f_virtual_microbatch_id=)
            combined_1f1b_schedule_for_interleaved_pipelining(post_backward=)
            combined_1f1b_schedule_for_interleaved_pipelining(post_forward=)
            combined_1f1b_schedule_for_interleaved_pipelining(pre_backward=)
            combined_1f1b_schedule_for_interleaved_pipelining(pre_forward=) deallocate_output_tensor
            finish_embedding_wgrad_compute forward_step(checkpoint_activations_microbatch=)
            forward_step(collect_non_loss_data=) forward_step(cp_group_size=) forward_step(is_last_stage=)
            forward_step(vp_stage=) get_pp_rank_microbatches get_pp_rank_microbatches(forward_only=)
            get_pp_rank_microbatches(overlap_moe_expert_parallel_comm=) get_pp_rank_microbatches(p2p_communicator=)
            get_schedule_table is_pp_first_stage is_pp_last_stage is_vp_first_stage is_vp_last_stage nvtx_range_pop
            nvtx_range_pop(suffix=) nvtx_range_push nvtx_range_push(suffix=) partial partial(vp_size=) .ExitStack
            .Module .__enter__ .__exit__ .config .encoder_and_decoder .enter_context .nn .parameters .pp_group .rank
            .recv_backward .recv_forward .send_backward_recv_backward .send_forward_backward_recv_forward_backward
            .send_forward_recv_forward .wait
        """,
        (0, 17): ".is_pp_last_stage",
        # The branch dev, and the draft Megatron-LM#6840 for it.
        (0, 19): """
            config.enable_attention_residuals config.enable_hyper_connections config.num_residual_streams
            attn_res_source_cache_reset attn_res_uniform_payload_slices
        """,
    },
    COMMUNICATOR: {
        (0, 14): """
            config.batch_p2p_comm config.batch_p2p_sync config.pipeline_dtype config.timers config.timers(log_level=)
            config.use_ring_exchange_p2p config.variable_seq_lengths config.virtual_pipeline_model_parallel_size
        """,
        (0, 16): "config.mtp_standalone",
    },
}

_TRIES = 10  # attempts to parse a source

# Attributes of lists, dicts and the like.
_OF_CONTAINERS = {name for kind in (list, dict, set, tuple, str) for name in dir(kind)}


def names_read(source: str) -> set[str]:
    """Names that a function or class uses and does not define itself.

    `config.x` (also by getattr), `.x` for an attribute of anything else, `f` for a function or class of its module, and
    `f(k=)` or `config.f(k=)` for a keyword that is passed to it.
    """
    tree = _parsed(textwrap.dedent(source)).body[0]
    own = set(_bound_names(tree)) | set(dir(builtins))
    for node in ast.walk(tree):  # annotations do not count
        if isinstance(node, ast.arg):
            node.annotation = None
    return {name for node in ast.walk(tree) for name in _names_of(node, own)}


def _parsed(source: str) -> ast.Module:
    """The parsed source. Tries again after a SystemError: Python 3.11 keeps one count of the parser's depth for all
    threads, so it is raised if other threads of the program parse at the same time (python/cpython#106905)."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def _bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _names_of(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in own:
        yield node.id
    elif isinstance(node, ast.Attribute) and node.attr not in _OF_CONTAINERS:
        yield _attribute(node.value, node.attr)
    elif isinstance(node, ast.Call):
        called = _called(node.func, own)
        if called in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            yield _attribute(node.args[0], node.args[1].value)
        elif called is not None:
            yield from (f"{called}({keyword.arg}=)" for keyword in node.keywords)


def _attribute(owner: ast.AST, name: Any) -> str:
    is_config = getattr(owner, "id", None) == "config" or getattr(owner, "attr", None) == "config"
    return f"config.{name}" if is_config else f".{name}"


def _called(function: ast.AST, own: set[str]) -> str | None:
    """The name of the called function if it is the module's, a builtin that reads an attribute, or a config's; else
    None."""
    if isinstance(function, ast.Name):
        return function.id if function.id in ("getattr", "hasattr") or function.id not in own else None
    if isinstance(function, ast.Attribute) and _attribute(function.value, "") == "config.":
        return f"config.{function.attr}"
    return None


def reads_of(schedules: ModuleType) -> dict[str, set[str]]:
    """Function of Megatron's schedules -> `names_read` of its source. The communicator has only its config fields.
    Functions that the program has replaced are left out. Raises OSError if there is no source, and SystemError as
    ``_parsed`` does.
    """
    functions = {name: inspect.unwrap(getattr(schedules, name)) for name in ENTRIES}
    own = {name: f for name, f in functions.items() if f.__globals__ is vars(schedules)}
    reads = {name: names_read(inspect.getsource(function)) for name, function in own.items()}
    communicator = names_read(inspect.getsource(getattr(schedules, COMMUNICATOR)))
    return {**reads, COMMUNICATOR: {name for name in communicator if name.startswith("config.")}}


def unknown_reads(schedules: ModuleType, release: tuple[int, int], version: str) -> str | None:
    """A sentence with the names that the schedules of `release` use and the table lacks up to that release. None if
    there are no such names.
    """
    try:
        reads = reads_of(schedules)
    except (OSError, TypeError, SystemError) as error:
        return f"megatron_pp cannot tell which names the schedules of megatron-core {version} use ({error})"
    unknown = {function: sorted(names - known_reads(function, release)) for function, names in reads.items()}
    if not any(unknown.values()):
        return None
    named = "; ".join(f"{function} uses {', '.join(names)}" for function, names in unknown.items() if names)
    return (
        f"the schedules of megatron-core {version} use names that megatron_pp does not know and that have no effect "
        f"in the steps that it runs: {named}"
    )


def known_reads(function: str, release: tuple[int, int]) -> set[str]:
    """The names that the table has for a function up to a release (major, minor)."""
    known: set[str] = set()
    for table in [KNOWN[function], KNOWN[EVERY] if function in ENTRIES else {}]:
        for since, names in table.items():
            known |= set(names.split()) if since <= release else set()
    return known

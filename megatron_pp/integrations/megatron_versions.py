"""The differences between releases of Megatron-core that the plug-in depends on, as a table.

Megatron's own `forward_step` and `backward_step` do the compute, so only the arguments of these functions and of
gradient finalisation, and the calls after it, are here. Sources: the tags core_v0.14.0 to core_v0.19.0 and the main
branch of August 2026 (0.20).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_pp.errors import UnknownMegatronError

NEVER, AFTER_TRAINING, ALWAYS = "never", "after training", "always"


@dataclass(frozen=True)
class Row:
    """One minor release, and all later ones until the next row.

    release           (major, minor)
    backward_only     parameters of `backward_step` besides the three tensors and config
    groups_keyword    keyword under which schedules and finalisation take the process groups
    force_all_reduce  whether both take `force_all_reduce`
    offload_reset     when the fine-grained activation offload is reset: never, after training, always
    graphs_field      config field by which Megatron captures CUDA graphs at the end of a schedule
    joint_group       whether finalisation is given, as tp_dp_cp, the group of all ranks of this pipeline stage
    fsdp_resync       without a pipeline, whether Megatron-FSDP's parameter gathering is synchronised after evaluation
    """

    release: tuple[int, int]
    backward_only: tuple[str, ...] = ("model_type",)
    groups_keyword: str = "pg_collection"
    force_all_reduce: bool = True
    offload_reset: str = ALWAYS
    graphs_field: str = "cuda_graph_impl"
    joint_group: bool = False
    fsdp_resync: bool = False


TABLE: tuple[Row, ...] = (
    Row(
        (0, 14),
        backward_only=("model_type", "pipeline_model_parallel_size"),
        groups_keyword="grad_finalize_pgs",
        force_all_reduce=False,
        offload_reset=NEVER,
        graphs_field="enable_cuda_graph",
    ),
    Row((0, 15), force_all_reduce=False, offload_reset=NEVER),
    Row((0, 16), offload_reset=AFTER_TRAINING),
    Row((0, 17), backward_only=()),
    Row((0, 18), backward_only=(), joint_group=True, fsdp_resync=True),
)

FORWARD_STEP = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "input_tensor",
    "forward_data_store",
    "config",
    "cp_group_size",
    "collect_non_loss_data",
    "checkpoint_activations_microbatch",
    "is_first_microbatch",
    "current_microbatch",
    "vp_stage",
    "is_last_stage",
)
BACKWARD_STEP = ("input_tensor", "output_tensor", "output_tensor_grad", "config")
ENTRY = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "decoder_seq_length",
    "forward_only",
    "collect_non_loss_data",
    "first_val_step",
    "adjust_tensor_shapes_fn",
)
ENTRIES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def row_of(version: str) -> Row:
    """The row for a version as Megatron prints it, such as "0.16.1" or "0.17.0rc0"; the newest row for newer ones.

    Raises UnknownMegatronError for a version older than the table.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    release = (int(match[1]), int(match[2])) if match else (0, 0)
    rows = [row for row in TABLE if row.release <= release]
    if not rows:
        oldest = ".".join(map(str, TABLE[0].release))
        raise UnknownMegatronError(
            f"megatron-core {version} is not supported; the oldest supported release is {oldest}"
        )
    return rows[-1]


def expected_signatures(row: Row) -> dict[str, tuple[str, ...]]:
    """Function of Megatron's schedules.py -> the parameters that the plug-in passes to it or takes."""
    entry = (*ENTRY, row.groups_keyword, *(("force_all_reduce",) if row.force_all_reduce else ()))
    return {
        "forward_step": FORWARD_STEP,
        "backward_step": (*BACKWARD_STEP, *row.backward_only),
        "clear_embedding_activation_buffer": ("config", "model", "is_last_stage"),
        "finish_embedding_wgrad_compute": ("config", "embedding_module", "is_last_stage", "tp_group"),
        **dict.fromkeys(ENTRIES, entry),
    }


# A caller's own communicator; not taken without a pipeline in early releases.
_OPTIONAL = dict.fromkeys(ENTRIES, ("p2p_communicator",))


def check_signatures(schedules: ModuleType, row: Row, version: str) -> None:
    """Raises UnknownMegatronError for the first function or parameter that differs from the table. An unknown parameter
    with a default keeps its default.
    """
    for name, expected in expected_signatures(row).items():
        function = getattr(schedules, name, None)
        if function is None:
            raise UnknownMegatronError(
                f"megatron-core {version}: megatron.core.pipeline_parallel.schedules has no {name}"
            )
        parameters = inspect.signature(function).parameters
        known = {*expected, *_OPTIONAL.get(name, ())}
        for missing in [p for p in expected if p not in parameters]:
            raise UnknownMegatronError(
                f"megatron-core {version}: {name} takes no parameter {missing!r}; megatron_pp expects "
                f"{name}({', '.join(expected)}), but it is {name}{inspect.signature(function)}"
            )
        for unknown in [p for p in parameters.values() if p.default is p.empty and p.name not in known]:
            raise UnknownMegatronError(
                f"megatron-core {version}: {name} asks for {unknown.name!r}, which is unknown to megatron_pp; "
                f"it expects {name}({', '.join(expected)})"
            )


def arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that ``function`` takes, by name."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}

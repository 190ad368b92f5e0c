"""A table of the differences between releases of Megatron-core that matter to the plug-in.

The releases that were read are those of `sources.py`.
"""

import re
from dataclasses import dataclass

from megatron_pp.errors import UnknownMegatronError

NEVER, AFTER_TRAINING, ALWAYS = "never", "after training", "always"


@dataclass(frozen=True)
class Row:
    """The differences of one minor release, and of all later ones until the next row."""

    release: tuple[int, int]  # (major, minor)
    backward_only: tuple[str, ...] = ("model_type",)  # parameters of `backward_step` after BACKWARD_STEP
    groups_keyword: str = "pg_collection"  # keyword of schedules and finalisation for the process groups
    force_all_reduce: bool = True  # whether schedules and finalisation take `force_all_reduce`
    offload_reset: str = ALWAYS  # when the fine-grained activation offload is reset
    graphs_field: str = "cuda_graph_impl"  # config field by which CUDA graphs are captured at a schedule's end
    joint_group: bool = False  # whether finalisation gets tp_dp_cp, the group of all ranks of this pipeline stage
    fsdp_resync: bool = False  # without a pipeline, whether evaluation ends with Megatron-FSDP's parameter gathering
    groups: tuple[str, ...] = ("tp", "cp", "pp", "embd", "pos_embd", "dp_cp")  # process groups that its schedules need


_EARLY = ("model_type", "pipeline_model_parallel_size")
TABLE: tuple[Row, ...] = (
    Row((0, 14), _EARLY, "grad_finalize_pgs", False, NEVER, graphs_field="enable_cuda_graph"),
    Row((0, 15), force_all_reduce=False, offload_reset=NEVER),
    Row((0, 16), offload_reset=AFTER_TRAINING),
    Row((0, 17), backward_only=(), groups=("tp", "cp")),
    Row((0, 18), backward_only=(), groups=("tp", "cp"), joint_group=True, fsdp_resync=True),
)

# Parameters of the schedules that all releases of the table have in common.
ENTRY = (
    "forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size",
    "decoder_seq_length", "forward_only", "collect_non_loss_data", "first_val_step", "adjust_tensor_shapes_fn",
)  # fmt: skip
ENTRIES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
COMMUNICATOR = "P2PCommunicator"


def release_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version as Megatron prints it, such as "0.16.1" or "0.17.0rc0"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def row_of(version: str) -> Row:
    """The row for a version; newer versions get the newest row. Raises UnknownMegatronError for an older version."""
    rows = [row for row in TABLE if row.release <= release_of(version)]
    if not rows:
        oldest = ".".join(map(str, TABLE[0].release))
        raise UnknownMegatronError(
            f"megatron-core {version} is not supported; the oldest supported release is {oldest}"
        )
    return rows[-1]


def entry_keywords(row: Row) -> tuple[str, ...]:
    """The keywords of the schedules without `p2p_communicator`, which early releases take in pipelines only."""
    return (*ENTRY, row.groups_keyword, *(("force_all_reduce",) if row.force_all_reduce else ()))

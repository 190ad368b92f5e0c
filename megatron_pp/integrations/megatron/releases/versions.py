"""A table of the differences between releases of Megatron-core that matter to the plug-in.

Functions that run a microbatch are recognised by digests of their sources. `steps/known_steps.py` does what known
functions do; unknown functions are called. The releases that were read are those of `sources.py`.
"""

import hashlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

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

# Parameters that all releases of the table have in common.
FORWARD_STEP = (
    "forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store", "config",
    "cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch", "is_first_microbatch",
    "current_microbatch", "vp_stage", "is_last_stage",
)  # fmt: skip
BACKWARD_STEP = ("input_tensor", "output_tensor", "output_tensor_grad", "config")
ENTRY = (
    "forward_step_func", "data_iterator", "model", "num_microbatches", "seq_length", "micro_batch_size",
    "decoder_seq_length", "forward_only", "collect_non_loss_data", "first_val_step", "adjust_tensor_shapes_fn",
)  # fmt: skip
TENSOR_SHAPES = ("seq_length", "micro_batch_size", "decoder_seq_length", "config", "tp_group", "cp_group")
ENTRIES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
COMMUNICATOR = "P2PCommunicator"

# Function of Megatron's schedules.py -> the first 12 digits of the SHA-256 of its sources in the releases 0.14 to 0.20.
# If a release lacks a function, no other function of that release calls it.
STEP_SOURCES: dict[str, str] = {
    "forward_step": "24c526af4445 d24e8a478a19",
    "forward_step_calc_loss": (
        "58517506d765 7a1192ac53d3 0b552e0742e6 d972e4b02f52 24757f83c3de 9990d300271b d64b2efcb498"
    ),
    "_get_experimental_attention_variant_loss_scale_func": "48af6cc05903",
    "set_current_microbatch": "df4c005d24bb ccb26564d148",
    "backward_step": "3682e74b1769 6ac4aa596b1b 435628e2479e b767f2485190",
    "custom_backward": "134012de6fb7",
}


def codes(schedules: ModuleType, names: Iterable[str]) -> dict[str, CodeType | None]:
    """The code of each of these functions; None if it is not a plain function."""
    return {name: getattr(getattr(schedules, name, None), "__code__", None) for name in names}


def known_steps(schedules: ModuleType) -> dict[str, CodeType]:
    """The code of the functions that run a microbatch; empty unless the table has the sources of all of them."""
    found = codes(schedules, (name for name in STEP_SOURCES if hasattr(schedules, name)))
    known = {name: code for name, code in found.items() if code is not None and _is_known(name, code)}
    return known if len(known) == len(found) else {}


def _is_known(name: str, code: CodeType) -> bool:
    source = digest(code)
    return bool(source) and source in STEP_SOURCES[name]


def digest(code: Any) -> str:
    """The first 12 digits of the SHA-256 of the source of a function, its code, or a class; empty without a source."""
    try:
        return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:12]
    except (OSError, TypeError):  # installed without source, or not written in Python
        return ""


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


def expected_signatures(row: Row) -> dict[str, tuple[str, ...]]:
    """Function of Megatron's schedules.py -> the parameters that the plug-in passes to it or takes."""
    entry = entry_keywords(row)
    return {
        "forward_step": FORWARD_STEP,
        "backward_step": (*BACKWARD_STEP, *row.backward_only),
        "custom_backward": ("output", "grad_output"),
        "clear_embedding_activation_buffer": ("config", "model", "is_last_stage"),
        "finish_embedding_wgrad_compute": ("config", "embedding_module", "is_last_stage", "tp_group"),
        "get_tensor_shapes": TENSOR_SHAPES,
        **dict.fromkeys(ENTRIES, entry),
    }


def check_signatures(schedules: ModuleType, row: Row, version: str) -> None:
    """Raises UnknownMegatronError for the first function or parameter that differs from the table. An unknown parameter
    with a default keeps its default.
    """
    where = f"megatron-core {version}:"
    for name, expected in expected_signatures(row).items():
        function = getattr(schedules, name, None)
        if function is None:
            raise UnknownMegatronError(f"{where} megatron.core.pipeline_parallel.schedules has no {name}")
        parameters, ours = inspect.signature(function).parameters, f"{name}({', '.join(expected)})"
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):  # the program's own wrapper
            continue
        for missing in [p for p in expected if p not in parameters]:
            raise UnknownMegatronError(
                f"{where} {name} takes no parameter {missing!r}; megatron_pp expects {ours}, but it is "
                f"{name}{inspect.signature(function)}"
            )
        known = {*expected, "p2p_communicator"} if name in ENTRIES else set(expected)
        for unknown in [p for p in parameters.values() if p.default is p.empty and p.name not in known]:
            raise UnknownMegatronError(
                f"{where} {name} asks for {unknown.name!r}, which is unknown to megatron_pp; it expects {ours}"
            )

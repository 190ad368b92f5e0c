"""Tells how the installed Megatron-core differs from known releases. Its functions are compared with the signatures of
the table, unless `sources.py` knows all of their sources.
"""

import inspect
from collections.abc import Sequence
from types import ModuleType

from megatron_pp.errors import UnknownMegatronError
from megatron_pp.integrations.megatron.releases.versions import ENTRIES, Row, entry_keywords

# Parameters that all releases of the table have in common.
FORWARD_STEP = (
    "forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store", "config",
    "cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch", "is_first_microbatch",
    "current_microbatch", "vp_stage", "is_last_stage",
)  # fmt: skip
BACKWARD_STEP = ("input_tensor", "output_tensor", "output_tensor_grad", "config")
TENSOR_SHAPES = ("seq_length", "micro_batch_size", "decoder_seq_length", "config", "tp_group", "cp_group")


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
        parameters = inspect.signature(function).parameters
        ours = f"{name}({', '.join(expected)})"
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


def sentence(changed: Sequence[str], version: str) -> str | None:
    """A sentence with the functions that differ; None if there are none."""
    if not changed:
        return None
    return (
        f"megatron-core {version} differs from every release that megatron_pp knows (0.14 to 0.19.2, and the branches "
        f"dev and main of August 2026) in {', '.join(changed)}. megatron_pp does what the newest known release does; "
        "to compare your training with one process: megatron-pp parity"
    )

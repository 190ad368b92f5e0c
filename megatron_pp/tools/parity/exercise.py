"""The flags of a script that a comparison cannot run, or leaves out. The answer names them, so that a user knows that
they were not compared."""

from __future__ import annotations

from megatron_pp.tools.flags.flags import Flags
from megatron_pp.tools.parity.workers.processes import RunError

_SHARDED = (
    "parity cannot read parameters that FSDP shards. Compare the layout without it, with --use-distributed-optimizer"
)
REFUSED = {
    "--use-megatron-fsdp": _SHARDED,
    "--use-custom-fsdp": _SHARDED,
    "--use-torch-fsdp2": _SHARDED,
    "--yaml-cfg": "parity reads sizes from flags. Give the sizes of the file as flags",
}
_PACKED = "parity makes no packed sequences; their attention needs Transformer Engine and a GPU"
NOT_MADE = {
    "--sft": _PACKED,
    "--dataloader-inter-document-masking": _PACKED,
    "--hybrid-context-parallel": _PACKED,
    "--dynamic-context-parallel": _PACKED,
    "--rampup-batch-size": "the number of microbatches does not change between steps",
    "--step-batch-size-schedule": "the number of microbatches does not change between steps",
}
"""Flags for data and steps that parallel code treats specially, and that a comparison does not make. The verdict of a
layout with such a flag is never "equal"."""
_LEFT_OUT = {
    "--optimizer-cpu-offload": "the optimizer's state stays where the model is",
    "--recompute-loss-function": "the loss is not recomputed",
    "--full-validation": "no evaluation is run",
}
DROPOUT = "it is off, because layouts draw different random numbers, which cannot be compared"


def refuse(flags: Flags) -> None:
    """Raises RunError for flags with which parity cannot compare."""
    for name in flags.having(REFUSED):
        raise RunError(f"{name}: {REFUSED[name]}")


def not_exercised(given: Flags, ran: Flags, needs_gpu: tuple[str, ...]) -> dict[str, str]:
    """Flag -> the reason why it is not compared. ``given`` has the script's flags, ``ran`` those of the runs."""
    found = {name: why for name, why in (NOT_MADE | _LEFT_OUT).items() if name in given}
    gone = [name for name in dict.fromkeys(name for name, _ in given.items) if name not in ran]
    return found | {name: "it needs a GPU" for name in gone if name in needs_gpu}

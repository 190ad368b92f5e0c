"""Scalars of the pipeline beside Megatron's own: through its TensorBoard writer, on the rank that has it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_pp.runtime.log_once import warn_once

if TYPE_CHECKING:
    from megatron_pp.features.measuring.metrics import StepMetrics

_WRITERS = "megatron.training.global_vars"
NAMES = ("pipeline/bubble", "pipeline/exposed wait (ms)", "pipeline/time (ms)")


def scalars(every: int) -> TensorBoardScalars | None:
    """What writes the metrics of every ``every``-th step; None on a rank without a writer, where nothing is measured.
    Megatron's training loop makes the writer on the last rank of the job, with `--tensorboard-dir`."""
    module = sys.modules.get(_WRITERS)
    writer = None if module is None else module.get_tensorboard_writer()
    if writer is not None:
        return TensorBoardScalars(writer, every)
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        warn_once(
            f"metrics={every} writes nothing: Megatron's training loop has no TensorBoard writer; give "
            "--tensorboard-dir, or a function metrics(step, numbers) to install()"
        )
    return None


@dataclass(frozen=True)
class TensorBoardScalars:
    writer: Any
    every: int

    def takes(self, step: int) -> bool:
        """``step``: as Megatron's loop has it within the step. What it logs of that step has the next number."""
        return (step + 1) % self.every == 0

    def __call__(self, step: int, numbers: StepMetrics) -> None:
        values = numbers.bubble, 1e3 * numbers.exposed_wait, 1e3 * numbers.pipeline
        for name, value in zip(NAMES, values, strict=True):
            self.writer.add_scalar(name, value, step + 1)

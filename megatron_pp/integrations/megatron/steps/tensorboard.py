"""Scalars of the pipeline beside Megatron's own: through its TensorBoard writer, which the last rank of the job has."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_pp.common.log_once import warn_once

if TYPE_CHECKING:
    from megatron_pp.comm.transport import Transport
    from megatron_pp.features.measuring.metrics import StepMetrics
    from megatron_pp.features.measuring.rank_numbers import RankNumbers

_WRITERS = "megatron.training.global_vars"
NAMES = ("pipeline/bubble {}", "pipeline/exposed wait {} (ms)", "pipeline/time {} (ms)")
"""Of each name the mean and the maximum over the pipeline's ranks are written."""


def scalars(every: int) -> TensorBoardScalars | None:
    """The sink that writes every ``every``-th step's metrics; None without a writer. Megatron's training loop makes a
    writer on the last rank of the job, with `--tensorboard-dir`."""
    module: Any = sys.modules.get(_WRITERS)
    writer = None if module is None else module.get_tensorboard_writer()
    if writer is not None or getattr(getattr(module, "_GLOBAL_ARGS", None), "tensorboard_dir", None):
        return TensorBoardScalars(writer, every)
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        warn_once(
            f"metrics={every} writes nothing: Megatron's training loop has no TensorBoard writer; give "
            "--tensorboard-dir, or a function metrics(step, numbers) to install()"
        )
    return None


@dataclass(frozen=True)
class TensorBoardScalars:
    """``writer``: None on other ranks than the last one."""

    writer: Any
    every: int

    def of_pipeline(self, transport: Transport) -> PipelineScalars | None:
        """For a step that begins. None in pipelines without the job's last rank, which measure nothing."""
        last = dist.get_world_size() - 1 if dist.is_initialized() else 0
        if last not in map(transport.global_rank, range(transport.size)):
            return None
        if transport.store is None and transport.size > 1:
            warn_once(f"metrics={self.every} writes nothing: the ranks of the pipeline share no store")
            return None
        from megatron_pp.features.measuring.rank_numbers import rank_numbers

        found = PipelineScalars(self.writer, self.every, rank_numbers(transport, self.writer is not None))
        found.write()
        return found


@dataclass(frozen=True)
class PipelineScalars:
    """The scalars of one pipeline. Each rank gives its numbers. The rank with the writer writes the numbers of all when
    a step begins or ends, as soon as they have arrived."""

    writer: Any
    every: int
    numbers: RankNumbers

    def takes(self, step: int) -> bool:
        """Whether step ``step`` is written. ``step``: its number within Megatron's loop, which logs it as the next."""
        return (step + 1) % self.every == 0

    def __call__(self, step: int, numbers: StepMetrics) -> None:
        values = numbers.bubble, 1e3 * numbers.exposed_wait, 1e3 * numbers.pipeline
        self.numbers.post(step, values)
        self.write()

    def write(self) -> None:
        for step, rows in self.numbers.take():
            for name, values in zip(NAMES, zip(*rows, strict=True), strict=True):
                self.writer.add_scalar(name.format("mean"), sum(values) / len(values), step + 1)
                self.writer.add_scalar(name.format("max"), max(values), step + 1)

"""The work of a benchmark step, and a step of any schedule with Megatron's signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_pp.plan.ir.spec import PlanSpec

PLUG_IN = "plug-in"
SECONDS = 100.0  # limit of a rank's waits, below the timeout of the benchmarks' process groups
MakeStage = Callable[[int], torch.nn.Module]
Step = Callable[[], None]


class Unavailable(RuntimeError):  # noqa: N818  (a reason, shown in the table)
    """The engine cannot run this work on this machine. The message is the reason."""


@dataclass(frozen=True)
class Work:
    """One step of one pipeline, which every engine runs.

    schedule   "1f1b", "interleaved_1f1b", "eager_1f1b", "gpipe", ...: a name of ``megatron_pp.plan.orders.SCHEDULES``
    policy     "overlap", "overlap+flush" (Megatron-core: warm-up and flush too; others: "overlap"), "plain" or
               "batched", if an engine has the choice
    shape      shape of the tensors between stages, [sequence, microbatch, hidden], float32
    """

    schedule: str
    pipeline_size: int
    num_chunks: int
    num_microbatches: int
    shape: tuple[int, int, int]
    policy: str = "overlap"

    @property
    def num_stages(self) -> int:
        return self.pipeline_size * self.num_chunks

    @property
    def virtual_size(self) -> int | None:
        """V in Megatron's form: None without model chunks."""
        return self.num_chunks if self.num_chunks > 1 else None

    def spec(self, **more: Any) -> PlanSpec:
        return PlanSpec(self.schedule, self.pipeline_size, self.num_chunks, self.num_microbatches, **more)

    @property
    def overlaps(self) -> bool:
        return self.policy.startswith("overlap")

    @property
    def virtual_microbatches(self) -> int:
        """The number of forwards of one rank, and of its backwards."""
        return self.num_microbatches * self.num_chunks

    @property
    def message_bytes(self) -> int:
        s, b, h = self.shape
        return 4 * s * b * h

    def label(self) -> str:
        parts = [self.schedule, f"P={self.pipeline_size}"]
        if self.num_chunks > 1:
            parts.append(f"V={self.num_chunks}")
        return " ".join([*parts, self.policy])


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def first_input(work: Work) -> torch.Tensor:
    """The input of the first stage, the same for every microbatch."""
    return torch.ones(work.shape)


def scheduled_step(work: Work, schedule: Callable[..., Any], chunks: Sequence[Any], **arguments: Any) -> Step:
    """A step of ``schedule``, a function with Megatron's signature, over this rank's ``chunks``."""
    x = first_input(work)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return loss_of(output), {}

    def forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
        return model(x), loss

    sizes = work.num_microbatches, work.shape[0], work.shape[1]
    return step_of(schedule, forward_step, chunks, lambda: None, *sizes, **arguments)


def step_of(
    schedule: Callable[..., Any],
    forward_step: Callable[..., Any],
    chunks: Sequence[Any],
    data: Callable[[], Any],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int = 1,
    **arguments: Any,
) -> Step:
    """A function that calls ``schedule``. ``data()`` gives a chunk's data iterator."""
    chunked = len(chunks) > 1

    def step() -> None:
        schedule(
            forward_step_func=forward_step,
            data_iterator=[data() for _ in chunks] if chunked else data(),
            model=chunks if chunked else chunks[0],
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            **arguments,
        )

    return step

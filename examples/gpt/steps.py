"""One global batch through the pipeline: to train on, or to evaluate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.gpt.data import SampleOrder
from examples.gpt.gpt import GPTStage
from examples.gpt.step_timer import ComputeTimers
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.weight_grad import store_of

Batches = Iterator[tuple[Tensor, Tensor]]


def forward_step(
    data_iterator: Batches | None, model: GPTStage, checkpoint_activations_microbatch: bool | None = None
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """One microbatch through one stage, as the schedules call it.

    The first and the last stage draw from ``data_iterator``; the others have none.
    """
    tokens, labels = next(data_iterator) if data_iterator is not None else (None, None)
    output = model(tokens, labels, checkpoint_activations=bool(checkpoint_activations_microbatch))
    return output, summed_loss if model.config.calculate_per_token_loss else mean_loss


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Megatron's pair: the mean over the microbatch, and what to report."""
    loss = losses.mean()
    return loss, {"loss": loss.detach()}


def summed_loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's triple: the sum over the microbatch, its tokens, and what to report (the mean, all the same)."""
    tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return losses.sum(), tokens, {"loss": losses.detach().mean()}


@dataclass(frozen=True)
class StepResult:
    """What one rank knows after a global batch.

    Attributes:
        losses: mean loss of each microbatch, in order; empty but on the last stage.
        seconds: wall time.
        compute_seconds: of these, inside forward and backward passes.
    """

    losses: list[float]
    seconds: float
    compute_seconds: float

    @property
    def bubble(self) -> float:
        """The share of the time in which this rank did not compute, between 0 and 1."""
        return max(0.0, 1.0 - self.compute_seconds / self.seconds)


class PipelineRunner:
    """Runs global batches through the pipeline, with the schedule that the config asks for.

    Args:
        chunks: this rank's chunks; their ``config.timers`` is set to ``timers``.
        timers: measures compute.
        data_rank: this rank's number among the replicas.
        device: where the chunks are.
    """

    def __init__(self, chunks: Sequence[GPTStage], timers: ComputeTimers, data_rank: int, device: torch.device) -> None:
        self.chunks = list(chunks)
        self.timers = timers
        self.data_rank = data_rank
        self.device = device
        config = self.chunks[0].config
        config.timers = timers
        store = store_of(self.chunks)
        if store is not None:
            store.timers = timers
        # None, not 1, tells the schedules that there are no chunks.
        self.num_chunks = config.virtual_pipeline_model_parallel_size
        self._schedule = get_forward_backward_func(config.pipeline_model_parallel_size, self.num_chunks)

    def run(self, samples: SampleOrder, step: int, forward_only: bool) -> StepResult:
        """Global batch ``step`` (0-based) of ``samples``. Gradients stay in the parameters unless ``forward_only``."""
        iterators = [self._iterator(chunk, samples, step) for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.train(not forward_only)
        self.timers.take_seconds()
        start = time.perf_counter()
        reports = self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if self._takes_lists else iterators[0],
            model=self.chunks if self._takes_lists else self.chunks[0],
            num_microbatches=samples.shape.num_microbatches,
            seq_length=samples.shape.seq_length,
            micro_batch_size=samples.shape.micro_batch_size,
            forward_only=forward_only,
        )
        losses = [float(report["loss"]) for report in reports]
        compute_seconds = self.timers.take_seconds()
        return StepResult(losses, time.perf_counter() - start, compute_seconds)

    @property
    def _takes_lists(self) -> bool:
        return len(self.chunks) > 1

    def _iterator(self, chunk: GPTStage, samples: SampleOrder, step: int) -> Batches | None:
        if not (chunk.pre_process or chunk.post_process):
            return None
        return samples.step_iterator(step, self.data_rank, self.device)

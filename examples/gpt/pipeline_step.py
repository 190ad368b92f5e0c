"""One global batch through the pipeline: this is where a program calls the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.gpt.data import SampleOrder
from examples.gpt.gpt import GPTStage
from megatron_pp.schedules import get_forward_backward_func
from megatron_pp.weight_grad import store_of


def forward_step(
    data_iterator: Iterator[tuple[Tensor, Tensor]] | None, model: GPTStage, checkpoint: bool | None = None
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """One microbatch through one stage, as the schedules call it. Stages in the middle have no ``data_iterator``."""
    tokens, labels = next(data_iterator) if data_iterator is not None else (None, None)
    output = model(tokens, labels, checkpoint_activations=bool(checkpoint))
    return output, summed_loss if model.config.calculate_per_token_loss else mean_loss


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Megatron's pair: the mean over the microbatch, and what to report."""
    loss = losses.mean()
    return loss, {"loss": loss.detach()}


def summed_loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's triple: the sum over the microbatch, its tokens, and what to report (the mean, all the same)."""
    tokens = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return losses.sum(), tokens, {"loss": losses.detach().mean()}


class _Timer:
    """Adds up spans of the host's time, or of a GPU's stream, between events."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.spans: list[list[Any]] = []

    def start(self, barrier: bool = False) -> None:
        self.spans.append([self._now()])

    def stop(self, barrier: bool = False) -> None:
        self.spans[-1].append(self._now())

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_seconds(self) -> float:
        spans, self.spans = self.spans, []
        if not self.on_gpu:
            return sum(stop - start for start, stop in spans)
        torch.cuda.synchronize()
        return sum(start.elapsed_time(stop) for start, stop in spans) / 1000.0


class ComputeTimers:
    """``config.timers``: adds up the time inside forward, backward and weight-gradient passes; ignores other names."""

    def __init__(self, device: torch.device) -> None:
        names = ("forward-compute", "backward-compute", "weight-compute", "other")
        self._timers = {name: _Timer(device.type == "cuda") for name in names}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return self._timers.get(name, self._timers["other"])

    def take_seconds(self) -> float:
        """Seconds of compute since the last call."""
        seconds = {name: timer.take_seconds() for name, timer in self._timers.items()}
        return sum(seconds.values()) - seconds["other"]


class StepResult(NamedTuple):
    """Of one rank and a global batch: the mean loss of each microbatch, on the last stage, and its idle share."""

    losses: list[float]
    bubble: float


class PipelineRunner:
    """Runs global batches through this rank's ``chunks`` with the schedule that their config asks for."""

    def __init__(self, chunks: Sequence[GPTStage], data_rank: int, device: torch.device) -> None:
        self.chunks, self.data_rank, self.device = list(chunks), data_rank, device
        config = self.chunks[0].config
        self.timers = config.timers = ComputeTimers(device)
        if (store := store_of(self.chunks)) is not None:
            store.timers = self.timers
        sizes = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
        self._schedule = get_forward_backward_func(*sizes)

    def run(self, samples: SampleOrder, step: int, forward_only: bool) -> StepResult:
        """Global batch ``step`` (0-based) of ``samples``. Gradients stay in the parameters unless ``forward_only``."""
        iterators: list[Any] = []
        for chunk in self.chunks:
            chunk.train(not forward_only)
            is_end = chunk.pre_process or chunk.post_process
            iterators.append(samples.step_iterator(step, self.data_rank, self.device) if is_end else None)
        several = len(self.chunks) > 1
        self.timers.take_seconds()
        start = time.perf_counter()
        reports = self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=self.chunks if several else self.chunks[0],
            num_microbatches=samples.shape.num_microbatches,
            seq_length=samples.shape.seq_length,
            micro_batch_size=samples.shape.micro_batch_size,
            forward_only=forward_only,
        )
        losses = [float(report["loss"]) for report in reports]
        compute = self.timers.take_seconds()
        return StepResult(losses, max(0.0, 1.0 - compute / (time.perf_counter() - start)))

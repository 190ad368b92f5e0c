"""The training loop of one rank. Here the program calls the engine."""

from __future__ import annotations

import math
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.gpt.checkpoint import Checkpoint, CheckpointWriter, load_tensors
from examples.gpt.data import VOCAB_SIZE, Microbatch, SampleOrder
from examples.gpt.errors import CheckpointError, NonFiniteLossError
from examples.gpt.gpt import GPTStage
from examples.gpt.metrics import Recorder, peak_memory_gib, peak_tflops
from examples.gpt.optimizer import GradientClipper, NamedAdamW, finalize_gradients, learning_rate
from examples.gpt.process import StopRequest
from examples.gpt.settings import Settings
from megatron_pp import get_forward_backward_func, parallel_state, sequence_slice
from megatron_pp.faults.attach import watched
from megatron_pp.runtime.communicators import communicator_for
from megatron_pp.weight_grad import store_of

COMPUTE_TIMERS = ("forward-compute", "backward-compute", "weight-compute")


def forward_step(
    data_iterator: Iterator[Microbatch], model: GPTStage, checkpoint: bool | None = None
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Run one microbatch through one stage. The schedules call this."""
    number, tokens, labels = next(data_iterator)
    output = model(tokens, labels, number, recompute=bool(checkpoint))
    return output, mean_loss


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of the microbatch, and the dict to report, as in Megatron. For a slice they are its own mean, and
    its share of the microbatch's loss, so that reports add up to whole microbatches."""
    loss, part = losses.mean(), sequence_slice()
    return loss, {"loss": loss.detach() if part is None else loss.detach() * part.share * part.count}


class ComputeTimers:
    """Megatron's ``config.timers``. Adds up the time of forwards, backwards and weight gradients, on the host or on a
    GPU's stream."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._marks: dict[str, list[Any]] = defaultdict(list)  # timer -> its starts and stops in turn

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        mark = partial(self._mark, name)
        return SimpleNamespace(start=mark, stop=mark)

    def _mark(self, name: str, barrier: bool = False) -> None:
        self._marks[name].append(torch.cuda.Event(enable_timing=True) if self.on_gpu else time.perf_counter())
        if self.on_gpu:
            self._marks[name][-1].record()

    def take_seconds(self) -> float:
        """The seconds of compute since the last call."""
        if self.on_gpu:
            torch.cuda.synchronize()
        marks = [self._marks[name] for name in COMPUTE_TIMERS]
        self._marks.clear()
        spans = [span for of_one in marks for span in zip(of_one[::2], of_one[1::2], strict=True)]
        return sum(start.elapsed_time(stop) / 1000.0 if self.on_gpu else stop - start for start, stop in spans)


@dataclass
class Trainer:
    """Trains this rank's chunks together with all other ranks. Construction is collective.

    All collective work is watched: if a rank fails, in a step or outside, every method raises a PipelineError on the
    other ranks. The attributes from ``steps_done`` on are the same on every rank."""

    settings: Settings
    chunks: list[GPTStage]
    training: SampleOrder
    validation: SampleOrder
    writer: CheckpointWriter
    recorder: Recorder
    stop: StopRequest
    optimizer: NamedAdamW
    device: torch.device

    steps_done: int = field(default=0, init=False)
    validated_at: int = field(default=-1, init=False)  # steps done at the last validation
    saved_at: int = field(default=-1, init=False)
    stopped_by: signal.Signals | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.config = config = self.chunks[0].config
        self.pipeline_group = parallel_state.get_pipeline_model_parallel_group()
        sizes = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
        config.finalize_model_grads_func = partial(finalize_gradients, self.chunks)
        self.timers = config.timers = ComputeTimers(self.device)
        if (store := store_of(self.chunks)) is not None:
            store.timers = self.timers
        self._schedule = get_forward_backward_func(*sizes)
        with self._watched("the set-up"):
            self.clipper = GradientClipper(self.chunks, self.pipeline_group, self.settings.clip_grad)
        self.recorder.say(f"{self.clipper.num_parameters:,} parameters")

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``. Collective. Raises CheckpointError if it cannot be used."""
        if type(validated_at := checkpoint.progress.get("validated_at")) is not int:
            raise CheckpointError(f"{checkpoint.path}: validated_at is {validated_at!r:.60}; it must be an int")
        with self._watched("loading a checkpoint"):
            load_tensors(checkpoint, self.optimizer.tensors())
        self.steps_done = self.saved_at = checkpoint.step
        self.validated_at = validated_at
        self.recorder.say(f"continuing from {checkpoint.path}")
        if self.steps_done >= self.settings.train_steps:
            asked = f"after step {self.steps_done} of {self.settings.train_steps} (--train-steps)"
            self.recorder.say(f"nothing is left to train {asked}; give a larger --train-steps to continue")

    def train(self) -> None:
        """Run all remaining steps, or until a signal. Collective. Raises NonFiniteLossError or CheckpointWriteError on
        every rank. A non-finite loss does not change the weights."""
        self._validate_and_save()
        while self.steps_done < self.settings.train_steps and self.stopped_by is None:
            self._step()
            self._validate_and_save()

    def _validate_and_save(self) -> None:
        """Validate and save if they are due after this step, or if an interrupted run has not done them."""
        settings, done, last = self.settings, self.steps_done, self.steps_done >= self.settings.train_steps
        due = done == 0 or last or (settings.eval_interval and done % settings.eval_interval == 0)
        if due and self.validated_at < done and self.stopped_by is None:
            self._validate()
        due = done > 0 and settings.save_interval and done % settings.save_interval == 0
        if (due or last or self.stopped_by is not None) and self.saved_at < done:
            self._save()

    def _step(self) -> None:
        """Run one optimizer step. After it all ranks have agreed on whether to stop."""
        start, settings = time.perf_counter(), self.settings
        with self._watched("the training step"):
            self.config.step_number = self.steps_done + 1
            losses, bubble = self._run_schedule(self.training, self.steps_done, forward_only=False)
            with self._watched("the norm of the gradient"):
                norm = float(self.clipper.clip())
            loss, bubble, memory, stopped_by = self._agree(losses, bubble)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"step {self.steps_done + 1} gave loss {loss} and gradient norm {norm}; the weights are not "
                f"changed: continue from a checkpoint with a lower --learning-rate than {settings.learning_rate}"
            )
        with self._watched("the optimizer step"):
            rate = learning_rate(self.steps_done, settings)
            self.optimizer.step(rate)
            self.steps_done += 1
            speed = self.training.tokens_per_step / (time.perf_counter() - start)
            values = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
            values |= {"tokens_per_second": round(speed, 1), "bubble": round(bubble, 4)}
            values |= {"peak_memory_gib": round(memory, 3), **self._mfu(speed)}
            self.recorder.record(self.steps_done, **values)
        self.stopped_by = stopped_by

    def _run_schedule(self, samples: SampleOrder, step: int, forward_only: bool) -> tuple[list[float], float]:
        """Run the global batch ``step`` (0-based) of ``samples``. Gradients stay in the parameters unless
        ``forward_only``. Returns the mean loss of each microbatch, on the last stage, and the share of the time in
        which this rank idled."""
        iterators: list[Any] = []
        for chunk in self.chunks:
            chunk.train(not forward_only)
            iterators.append(samples.step_iterator(step, parallel_state.get_data_parallel_rank(), self.device))
        self.timers.take_seconds()
        start = time.perf_counter()
        reports = self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators,
            model=self.chunks,
            num_microbatches=samples.num_microbatches,
            seq_length=samples.seq_length,
            micro_batch_size=samples.micro_batch_size,
            forward_only=forward_only,
        )
        losses = [float(report["loss"]) for report in reports]
        compute = self.timers.take_seconds()
        return losses, max(0.0, 1.0 - compute / (time.perf_counter() - start))

    def _mfu(self, tokens_per_second: float) -> dict[str, float]:
        """Model FLOPs utilization (Chowdhery et al., 2204.02311, appendix B), if the device's peak is known."""
        peak = (self.settings.peak_tflops or peak_tflops(self.device)) * 1e12 * dist.get_world_size()
        config, parameters = self.config, self.clipper.num_parameters
        if self.settings.untie_embeddings_and_output_weights:  # an embedding's look-up is not a matrix product
            parameters -= VOCAB_SIZE * config.hidden_size
        flops = 6 * parameters + 12 * config.num_layers * config.hidden_size * self.settings.seq_length
        return {"mfu": tokens_per_second * flops / peak} if peak else {}

    def _validate(self) -> None:
        """Record the mean loss over the first global batches of the validation text. A signal ends it without a record.
        Collective."""
        total, batches = 0.0, self.settings.eval_steps
        with self._watched("the validation"):
            for batch in range(batches):
                loss, *_, self.stopped_by = self._agree(*self._run_schedule(self.validation, batch, forward_only=True))
                total += loss
                if self.stopped_by is not None and batch + 1 < batches:
                    return
        self.validated_at = self.steps_done
        self.recorder.record(self.steps_done, validation_loss=total / batches)

    def _save(self) -> None:
        with self._watched("saving a checkpoint"):
            path = self.writer.save(self.steps_done, self.optimizer.tensors(), {"validated_at": self.validated_at})
        self.saved_at = self.steps_done
        self.recorder.say(f"saved {path}")

    def _agree(self, losses: list[float], bubble: float) -> tuple[float, float, float, signal.Signals | None]:
        """Exchange values of a global batch in one message. Returns the mean loss, the mean idle share, the largest
        peak memory, and the signal to stop on."""
        known = [sum(losses), len(losses), bubble, peak_memory_gib(self.device), self.stop.first or 0]
        own = torch.tensor(known, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        with self._watched("agreeing on the loss"):
            dist.all_gather(everyone, own)
        sums, counts, bubbles, memories, signals = torch.stack(everyone, 1).tolist()
        stopped_by = signal.Signals(int(max(signals))) if any(signals) else None
        return sum(sums) / sum(counts), sum(bubbles) / len(bubbles), max(memories), stopped_by

    def _watched(self, what: str) -> AbstractContextManager[Any]:
        """A context for collective work, which ``what`` names: if a rank fails in it, the waits of the others end."""
        return watched(communicator_for(self.pipeline_group, self.config), self.config, what)

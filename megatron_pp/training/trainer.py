"""The training loop of one rank."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.config import TransformerConfig
from megatron_pp.models.gpt import GPTStage
from megatron_pp.training.arguments import RunArguments
from megatron_pp.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    load_tensors,
    restore_rng,
    rng_tensors,
)
from megatron_pp.training.data import SampleOrder
from megatron_pp.training.errors import NonFiniteLossError
from megatron_pp.training.gradients import GradientClipper, GradientFinalizer
from megatron_pp.training.grid import GridMember
from megatron_pp.training.interrupt import StopRequest
from megatron_pp.training.metrics import Recorder
from megatron_pp.training.optimizer import LearningRate, NamedAdamW
from megatron_pp.training.step_timer import ComputeTimers
from megatron_pp.training.steps import PipelineRunner, StepResult


@dataclass(frozen=True)
class Texts:
    """The samples to learn from and to validate on; ``digest`` tells one text from another."""

    training: SampleOrder
    validation: SampleOrder
    digest: str


@dataclass(frozen=True)
class Outcome:
    """How training ended; the same on every rank.

    Attributes:
        steps: optimizer steps done, since the run's very start.
        validation_before, validation_after: validation loss before the first step and the newest, nats per byte.
        validated_at: steps done when the newest was measured.
        checkpoint: the newest checkpoint.
        interrupted: a signal ended it early.
    """

    steps: int
    validation_before: float
    validation_after: float
    validated_at: int
    checkpoint: Path
    interrupted: bool


@dataclass(frozen=True)
class _StepSummary:
    """What all ranks know after a global batch."""

    loss: float
    bubble: float
    stop: bool


class Trainer:
    """Trains this rank's chunks together with all other ranks. Construction is collective.

    Args:
        run: the program's settings.
        chunks: this rank's chunks, on ``device``; their ``config`` is given its hooks here.
        grid: this rank's place and groups.
        device: where the chunks are.
        texts: see :class:`Texts`.
        writer: writes checkpoints.
        recorder: writes metrics and shows progress on rank 0; silent elsewhere.
        stop: asked at the end of every step.
    """

    def __init__(
        self,
        run: RunArguments,
        chunks: list[GPTStage],
        grid: GridMember,
        device: torch.device,
        texts: Texts,
        writer: CheckpointWriter,
        recorder: Recorder,
        stop: StopRequest,
    ) -> None:
        self.run = run
        self.device = device
        self.texts = texts
        self.writer = writer
        self.recorder = recorder
        self.stop = stop
        self.rank = dist.get_rank()
        config: TransformerConfig = chunks[0].config
        config.finalize_model_grads_func = GradientFinalizer(chunks, grid)
        self.runner = PipelineRunner(chunks, ComputeTimers(device), grid.data_rank, device)
        self.clipper = GradientClipper(chunks, grid.pipeline_group, run.clip_grad)
        self.optimizer = NamedAdamW(chunks, (run.adam_beta1, run.adam_beta2), run.adam_eps, run.weight_decay)
        self.learning_rate = LearningRate(run.learning_rate, run.min_learning_rate, run.warmup_steps, run.train_steps)
        self.steps_done = 0
        self.validation_before = math.nan
        self.validation_after = math.nan
        self.validated_at = 0
        self.saved: Path | None = None

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``. Collective.

        Raises:
            CheckpointError: its tensors cannot be read.
        """
        tensors = self._state()
        load_tensors(checkpoint, tensors)
        restore_rng(tensors, self.rank, self.device)
        self.steps_done = checkpoint.step
        self.validation_before = checkpoint.progress["validation_before"]
        self.validation_after = checkpoint.progress["validation_after"]
        self.validated_at = checkpoint.progress["validated_at"]
        self.saved = checkpoint.path
        self.recorder.say(f"continuing from {checkpoint.path}")
        if checkpoint.progress["text"] != self.texts.digest:
            self.recorder.say("the text is not the one that this run began with")

    def train(self) -> Outcome:
        """Run all steps that are left, or until a signal. Collective.

        Raises:
            NonFiniteLossError: on every rank after the same step, which leaves the weights as they were.
            CheckpointError: a checkpoint cannot be written.
        """
        run = self.run
        interrupted = False
        if self.saved is None:
            self.validation_before = self._validate()
        while self.steps_done < run.train_steps and not interrupted:
            interrupted = self._step()
            done, last = self.steps_done, self.steps_done == run.train_steps
            if last or _is_due(done, run.eval_interval):
                self._validate()
            if last or interrupted or _is_due(done, run.save_interval):
                self._save()
        if self.saved is None:
            self._save()
        assert self.saved is not None
        return Outcome(
            self.steps_done,
            self.validation_before,
            self.validation_after,
            self.validated_at,
            self.saved,
            interrupted,
        )

    def _step(self) -> bool:
        """One optimizer step. Returns whether any rank was asked to stop."""
        start = time.perf_counter()
        result = self.runner.run(self.texts.training, self.steps_done, forward_only=False)
        norm = float(self.clipper.clip())
        summary = self._agree(result)
        if not (math.isfinite(summary.loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"step {self.steps_done + 1} gave loss {summary.loss} and gradient norm {norm}; the weights are as "
                f"before it: continue from a checkpoint with a lower --learning-rate than {self.run.learning_rate}"
            )
        rate = self.learning_rate.at(self.steps_done)
        self.optimizer.step(rate)
        self.steps_done += 1
        self.recorder.training_step(
            self.steps_done,
            loss=summary.loss,
            learning_rate=rate,
            gradient_norm=norm,
            tokens_per_second=self.texts.training.shape.tokens / (time.perf_counter() - start),
            bubble=summary.bubble,
        )
        return summary.stop

    def _validate(self) -> float:
        """Mean loss over the first global batches of the validation text. Collective."""
        run = self.run
        results = [self.runner.run(self.texts.validation, i, forward_only=True) for i in range(run.eval_steps)]
        loss = sum(self._agree(result).loss for result in results) / run.eval_steps
        self.validation_after, self.validated_at = loss, self.steps_done
        self.recorder.validation(self.steps_done, loss)
        return loss

    def _agree(self, result: StepResult) -> _StepSummary:
        """Put together what the ranks know, in one small message."""
        known = torch.tensor(
            [sum(result.losses), len(result.losses), result.bubble, float(self.stop.requested)],
            dtype=torch.float64,
            device=self.device,
        )
        dist.all_reduce(known)
        losses, count, bubbles, stops = known.tolist()
        return _StepSummary(losses / count, bubbles / dist.get_world_size(), stops > 0)

    def _save(self) -> None:
        progress = {
            "validation_before": self.validation_before,
            "validation_after": self.validation_after,
            "validated_at": self.validated_at,
            "text": self.texts.digest,
        }
        self.saved = self.writer.save(self.steps_done, self._state(), progress)
        self.recorder.saved(self.saved)

    def _state(self) -> dict[str, Any]:
        return {**self.optimizer.tensors(), **rng_tensors(self.rank, self.device)}


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0

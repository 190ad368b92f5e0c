"""The training loop of one rank."""

from __future__ import annotations

import math
import signal
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.gpt.arguments import RunArguments
from examples.gpt.checkpoint import CheckpointWriter, load_tensors, restore_rng, rng_tensors
from examples.gpt.data import SampleOrder
from examples.gpt.description import Checkpoint
from examples.gpt.errors import NonFiniteLossError
from examples.gpt.gpt import GPTStage
from examples.gpt.gradients import GradientClipper, GradientFinalizer
from examples.gpt.grid import GridMember
from examples.gpt.interrupt import StopRequest, granted
from examples.gpt.metrics import Recorder
from examples.gpt.optimizer import Adam, LearningRate, NamedAdamW
from examples.gpt.step_timer import ComputeTimers
from examples.gpt.steps import PipelineRunner, StepResult
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.faults.attach import watched
from megatron_pp.runtime.communicators import communicator_for

_NEVER = -1  # steps done when something happened that has not happened yet


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
        validation_before, validation_after: validation loss before the first step and the newest, nats per byte; not a
            number where a signal came before the first.
        validated_at: steps done when the newest was measured.
        checkpoint: the newest checkpoint.
        stopped_by: the signal, to any rank, that ended it early; ``None`` when all steps are done.
    """

    steps: int
    validation_before: float
    validation_after: float
    validated_at: int
    checkpoint: Path
    stopped_by: signal.Signals | None


@dataclass(frozen=True)
class _StepSummary:
    """What all ranks know after a global batch. ``stop``: the signal on which they stop."""

    loss: float
    bubble: float
    stop: signal.Signals | None


class Trainer:
    """Trains this rank's chunks together with all other ranks. Construction is collective.

    All that the ranks do together is watched (:mod:`megatron_pp.faults`): where one of them fails, in a step or
    outside, every method raises a :class:`megatron_pp.errors.PipelineError` on the others.

    Args:
        run: the program's settings.
        chunks: this rank's chunks, on ``device``; their ``config`` is given its hooks here.
        grid: this rank's place and groups.
        device: where the chunks are.
        texts: see :class:`Texts`.
        writer: writes checkpoints.
        recorder: writes metrics and shows progress on rank 0; silent elsewhere.
        stop: asked at the end of every step and every batch of a validation.
        adam: whose AdamW; torch's by default.
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
        adam: Adam | None = None,
    ) -> None:
        self.run = run
        self.device = device
        self.texts = texts
        self.writer = writer
        self.recorder = recorder
        self.stop = stop
        self.rank = dist.get_rank()
        config: TransformerConfig = chunks[0].config
        self.config = config
        self.pipeline_group = grid.pipeline_group
        config.finalize_model_grads_func = GradientFinalizer(chunks, grid)
        self.runner = PipelineRunner(chunks, ComputeTimers(device), grid.data_rank, device)
        with self._watched("the set-up"):
            self.clipper = GradientClipper(chunks, grid.pipeline_group, run.clip_grad)
        self.optimizer = NamedAdamW(chunks, (run.adam_beta1, run.adam_beta2), run.adam_eps, run.weight_decay, adam)
        self.learning_rate = LearningRate(run.learning_rate, run.min_learning_rate, run.warmup_steps, run.train_steps)
        self.steps_done = 0
        self.validation_before = math.nan
        self.validation_after = math.nan
        self.validated_at = _NEVER
        self.saved: Path | None = None
        self._saved_at = _NEVER
        self._stopped_by: signal.Signals | None = None

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``. Collective.

        Raises:
            CheckpointError: its notes or its tensors cannot be used.
        """
        before, after = (checkpoint.note(f"validation_{when}", float, int) for when in ("before", "after"))
        validated_at, text = checkpoint.note("validated_at", int), checkpoint.note("text", str)
        tensors = self._state()
        with self._watched("loading a checkpoint"):
            load_tensors(checkpoint, tensors)
        restore_rng(tensors, self.rank, self.device)
        self.steps_done = checkpoint.step
        self.validation_before, self.validation_after, self.validated_at = before, after, validated_at
        self.saved, self._saved_at = checkpoint.path, checkpoint.step
        self.recorder.say(f"continuing from {checkpoint.path}")
        if text != self.texts.digest:
            self.recorder.say("the text is not the one that this run began with")

    def train(self) -> Outcome:
        """Run all steps that are left, or until a signal. Collective.

        Raises:
            NonFiniteLossError: on every rank after the same step, which leaves the weights as they were.
            CheckpointWriteError: on every rank.
        """
        self._round_off_step()
        while self.steps_done < self.run.train_steps and self._stopped_by is None:
            self._step()
            self._round_off_step()
        assert self.saved is not None
        return Outcome(
            self.steps_done,
            self.validation_before,
            self.validation_after,
            max(self.validated_at, 0),
            self.saved,
            self._stopped_by,
        )

    def _round_off_step(self) -> None:
        """Validate and save where that is due after the steps done; also what an interrupted run has left undone."""
        run, done = self.run, self.steps_done
        last = done >= run.train_steps
        if self.validated_at < done and (done == 0 or last or _is_due(done, run.eval_interval)):
            self._validate()
        due = last or self._stopped_by is not None or (done > 0 and _is_due(done, run.save_interval))
        if due and self._saved_at < done:
            self._save()

    def _step(self) -> None:
        """One optimizer step, after which all ranks know whether any was asked to stop."""
        start = time.perf_counter()
        with self._watched("the training step"):
            self.config.step_number = self.steps_done + 1
            result = self.runner.run(self.texts.training, self.steps_done, forward_only=False)
            with self._watched("the norm of the gradient"):
                norm = float(self.clipper.clip())
            summary = self._agree(result)
        if not (math.isfinite(summary.loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"step {self.steps_done + 1} gave loss {summary.loss} and gradient norm {norm}; the weights are as "
                f"before it: continue from a checkpoint with a lower --learning-rate than {self.run.learning_rate}"
            )
        with self._watched("the optimizer step"):
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
        self._stopped_by = summary.stop

    def _validate(self) -> None:
        """Mean loss over the first global batches of the validation text; a signal ends it without. Collective."""
        if self._stopped_by is not None:
            return
        losses = []
        with self._watched("the validation"):
            for batch in range(self.run.eval_steps):
                summary = self._agree(self.runner.run(self.texts.validation, batch, forward_only=True))
                losses.append(summary.loss)
                self._stopped_by = summary.stop
                if self._stopped_by is not None and len(losses) < self.run.eval_steps:
                    return
        self.validation_after, self.validated_at = sum(losses) / self.run.eval_steps, self.steps_done
        if self.steps_done == 0:
            self.validation_before = self.validation_after
        self.recorder.validation(self.steps_done, self.validation_after)

    def _watched(self, what: str) -> AbstractContextManager[Any]:
        """Around ``what`` ranks do together: a failure of one of them ends the others' waits."""
        return watched(communicator_for(self.pipeline_group, self.config), self.config, what)

    def _agree(self, result: StepResult) -> _StepSummary:
        """Put together what the ranks know, in one small message."""
        known = torch.tensor(
            [sum(result.losses), len(result.losses), result.bubble, *self.stop.wishes()],
            dtype=torch.float64,
            device=self.device,
        )
        with self._watched("agreeing on the loss"):
            dist.all_reduce(known)
        losses, count, bubbles, *wishes = known.tolist()
        return _StepSummary(losses / count, bubbles / dist.get_world_size(), granted(wishes))

    def _save(self) -> None:
        progress = {
            "validation_before": self.validation_before,
            "validation_after": self.validation_after,
            "validated_at": self.validated_at,
            "text": self.texts.digest,
        }
        with self._watched("saving a checkpoint"):
            self.saved = self.writer.save(self.steps_done, self._state(), progress)
        self._saved_at = self.steps_done
        self.recorder.saved(self.saved)

    def _state(self) -> dict[str, Any]:
        return {**self.optimizer.tensors(), **rng_tensors(self.rank, self.device)}


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0

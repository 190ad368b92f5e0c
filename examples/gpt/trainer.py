"""The training loop of one rank."""

from __future__ import annotations

import math
import signal
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from examples.gpt.checkpoint import CheckpointWriter, load_tensors, restore_rng, rng_tensors
from examples.gpt.data import VOCAB_SIZE, SampleOrder
from examples.gpt.description import Checkpoint
from examples.gpt.errors import NonFiniteLossError
from examples.gpt.gpt import GPTStage
from examples.gpt.gradients import GradientClipper, finalize_gradients
from examples.gpt.interrupt import StopRequest, agreed_signal
from examples.gpt.metrics import Recorder, peak_memory_gib, peak_tflops
from examples.gpt.optimizer import NamedAdamW, learning_rate
from examples.gpt.pipeline_step import PipelineRunner
from examples.gpt.settings import Settings
from megatron_pp import parallel_state
from megatron_pp.faults.attach import watched
from megatron_pp.plan.placement import Placement
from megatron_pp.runtime.communicators import communicator_for


class Texts(NamedTuple):
    """The samples to learn from and to validate on; ``digest`` differs between texts."""

    training: SampleOrder
    validation: SampleOrder
    digest: str


class Trainer:
    """Trains this rank's chunks together with all other ranks. Construction is collective.

    All that the ranks do together is watched (megatron_pp.faults): where one of them fails, in a step or outside, every
    method raises a PipelineError on the others. The public attributes are the same on every rank.
    """

    def __init__(
        self,
        settings: Settings,
        chunks: list[GPTStage],
        texts: Texts,
        writer: CheckpointWriter,
        recorder: Recorder,
        stop: StopRequest,
        optimizer: NamedAdamW,
        device: torch.device,
    ) -> None:
        self.settings, self.config, self.device, self.texts = settings, chunks[0].config, device, texts
        self.writer, self.recorder, self.stop, self.optimizer = writer, recorder, stop, optimizer
        config, self.pipeline_group = self.config, parallel_state.get_pipeline_model_parallel_group()
        sizes = config.pipeline_model_parallel_size, config.num_chunks
        last_rank = Placement(config.placement_name, *sizes).homes[-1][0]
        last_stage_rank = dist.get_global_rank(self.pipeline_group, last_rank)
        config.finalize_model_grads_func = partial(finalize_gradients, chunks, last_stage_rank)
        self.runner = PipelineRunner(chunks, parallel_state.get_data_parallel_rank(), device)
        with self._watched("the set-up"):
            self.clipper = GradientClipper(chunks, self.pipeline_group, settings.clip_grad)
        self.steps_done = 0
        self.validation_before = self.validation_after = math.nan  # loss, nats per byte
        self.validated_at = self.saved_at = -1  # steps done then; never
        self.stopped_by: signal.Signals | None = None
        recorder.say(f"{self.clipper.num_parameters:,} parameters")

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from ``checkpoint``. Collective. Raises CheckpointError: it cannot be used."""
        before, after = (checkpoint.note(f"validation_{when}", float, int) for when in ("before", "after"))
        validated_at, text = checkpoint.note("validated_at", int), checkpoint.note("text", str)
        tensors = self._tensors()
        with self._watched("loading a checkpoint"):
            load_tensors(checkpoint, tensors)
        restore_rng(tensors, dist.get_rank(), self.device)
        self.steps_done = self.saved_at = checkpoint.step
        self.validation_before, self.validation_after, self.validated_at = before, after, validated_at
        self.recorder.say(f"continuing from {checkpoint.path}")
        if text != self.texts.digest:
            self.recorder.say("the text is not the one that this run began with")

    def train(self) -> None:
        """Run all steps that are left, or until a signal. Collective.

        Raises NonFiniteLossError, which leaves the weights as they were, or CheckpointWriteError on every rank.
        """
        self._validate_and_save()
        while self.steps_done < self.settings.train_steps and self.stopped_by is None:
            self._step()
            self._validate_and_save()

    def _validate_and_save(self) -> None:
        """Where that is due after the steps done; also what an interrupted run has left undone."""
        settings, done, last = self.settings, self.steps_done, self.steps_done >= self.settings.train_steps
        due = done == 0 or last or (settings.eval_interval and done % settings.eval_interval == 0)
        if due and self.validated_at < done and self.stopped_by is None:
            self._validate()
        due = done > 0 and settings.save_interval and done % settings.save_interval == 0
        if (due or last or self.stopped_by is not None) and self.saved_at < done:
            self._save()

    def _step(self) -> None:
        """One optimizer step, after which all ranks have agreed on whether to stop."""
        start, settings = time.perf_counter(), self.settings
        with self._watched("the training step"):
            self.config.step_number = self.steps_done + 1
            result = self.runner.run(self.texts.training, self.steps_done, forward_only=False)
            with self._watched("the norm of the gradient"):
                norm = float(self.clipper.clip())
            loss, bubble, memory, stopped_by = self._agree(*result)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"step {self.steps_done + 1} gave loss {loss} and gradient norm {norm}; the weights are as before it: "
                f"continue from a checkpoint with a lower --learning-rate than {settings.learning_rate}"
            )
        with self._watched("the optimizer step"):
            rates = settings.learning_rate, settings.min_learning_rate, settings.warmup_steps, settings.train_steps
            rate = learning_rate(self.steps_done, *rates)
            self.optimizer.step(rate)
            self.steps_done += 1
            speed = self.texts.training.shape.tokens / (time.perf_counter() - start)
            values = {"loss": loss, "learning_rate": rate, "gradient_norm": norm, "tokens_per_second": round(speed, 1)}
            values |= {"bubble": round(bubble, 4), "peak_memory_gib": round(memory, 3), **self._mfu(speed)}
            self.recorder.record(self.steps_done, **values)
        self.stopped_by = stopped_by

    def _mfu(self, tokens_per_second: float) -> dict[str, float]:
        """Model FLOPs utilization (Chowdhery et al., 2204.02311, appendix B), where the device's peak is known."""
        peak = (self.settings.peak_tflops or peak_tflops(self.device)) * 1e12 * dist.get_world_size()
        config, parameters = self.config, self.clipper.num_parameters
        if self.settings.untie_embeddings_and_output_weights:  # looking up an embedding is no matrix product
            parameters -= VOCAB_SIZE * config.hidden_size
        flops = 6 * parameters + 12 * config.num_layers * config.hidden_size * self.settings.seq_length
        return {"mfu": tokens_per_second * flops / peak} if peak else {}

    def _validate(self) -> None:
        """Mean loss over the first global batches of the validation text; a signal ends it without. Collective."""
        total, batches = 0.0, self.settings.eval_steps
        with self._watched("the validation"):
            for batch in range(batches):
                result = self.runner.run(self.texts.validation, batch, forward_only=True)
                loss, _, _, self.stopped_by = self._agree(*result)
                total += loss
                if self.stopped_by is not None and batch + 1 < batches:
                    return
        self.validation_after, self.validated_at = total / batches, self.steps_done
        if self.steps_done == 0:
            self.validation_before = self.validation_after
        self.recorder.record(self.steps_done, validation_loss=self.validation_after)

    def _save(self) -> None:
        progress = {"validation_before": self.validation_before, "validation_after": self.validation_after}
        progress |= {"validated_at": self.validated_at, "text": self.texts.digest}
        with self._watched("saving a checkpoint"):
            path = self.writer.save(self.steps_done, self._tensors(), progress)
        self.saved_at = self.steps_done
        self.recorder.say(f"saved {path}")

    def _agree(self, losses: list[float], bubble: float) -> tuple[float, float, float, signal.Signals | None]:
        """Mean loss, mean bubble, largest peak memory and the signal to stop on, from all ranks, in one message."""
        world = dist.get_world_size()
        memories = [0.0] * world
        memories[dist.get_rank()] = peak_memory_gib(self.device)
        own = [sum(losses), len(losses), bubble, *memories, *self.stop.votes()]
        known = torch.tensor(own, dtype=torch.float64, device=self.device)
        with self._watched("agreeing on the loss"):
            dist.all_reduce(known)
        loss, count, bubbles, *rest = known.tolist()
        return loss / count, bubbles / world, max(rest[:world]), agreed_signal(rest[world:])

    def _watched(self, what: str) -> AbstractContextManager[Any]:
        """Around ``what`` ranks do together: a failure of one of them ends the others' waits."""
        return watched(communicator_for(self.pipeline_group, self.config), self.config, what)

    def _tensors(self) -> dict[str, Any]:
        return {**self.optimizer.tensors(), **rng_tensors(dist.get_rank(), self.device)}

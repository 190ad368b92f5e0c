"""The training program from command line to exit code; ``scripts/train.py`` calls ``main``."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch

from examples.gpt.arguments import RunArguments, make_config, parse_arguments
from examples.gpt.checkpoint import CheckpointWriter
from examples.gpt.data import VOCAB_SIZE, BatchShape, SampleOrder, read_text, split_text
from examples.gpt.description import Checkpoint
from examples.gpt.errors import (
    BrokenOffError,
    CheckpointError,
    CheckpointLayoutError,
    CheckpointWriteError,
    NoCheckpointError,
    RunInUseError,
    TrainingError,
)
from examples.gpt.grid import Process, choose_device, join_grid, joined
from examples.gpt.interrupt import StoppedAtOnceError, StopRequest
from examples.gpt.libraries import choose_libraries
from examples.gpt.lock import end_with_launcher
from examples.gpt.metrics import METRICS, PLOT, Recorder, plot_losses
from examples.gpt.model import build_model, splits_backward
from examples.gpt.rendezvous_store import check_same_flags
from examples.gpt.restart import agreed_start, find_start, remember, this_agent
from examples.gpt.timeline import merge, switch_on
from examples.gpt.trainer import Outcome, Texts, Trainer
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.errors import ConfigError, PipelineError, PlanError, ScheduleInputError

VALIDATION_SEED = 0
"""Every run validates on the same samples, whatever its own seed."""


EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (CheckpointWriteError, 4),
    (RunInUseError, 5),
    (PipelineError, 1),
    (BrokenOffError, 1),
    (CheckpointLayoutError, 2),
    (NoCheckpointError, 2),
    (CheckpointError, 3),
    (TrainingError, 2),
    (ConfigError, 2),
    (ScheduleInputError, 2),
    (PlanError, 2),
)
"""The first kind that an error is of has its exit code. All of these are told in one line."""


def main(argv: Sequence[str]) -> int:
    """Run the program.

    Returns the exit code: 0 when all steps are done; 128 + the signal's number where one, to any rank, ended the run
    early, with a checkpoint; that of ``EXIT_CODES`` after an error named there; 1 after any other failure. Another
    rank's failure is told in one line too, as the stack of a rank that only waited says nothing.
    """
    end_with_launcher()
    try:
        outcome = train(argv)
    except StoppedAtOnceError as stop:
        return _told(stop, 128 + stop.number)
    except Exception as error:
        for kind, code in EXIT_CODES:
            if isinstance(error, kind):
                return _told(error, code)
        traceback.print_exc()
        return 1
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def end_process(code: int) -> NoReturn:
    """Leave with the code that ``main`` returned.

    After a failure without taking leave: the destructors of an aborted process group may wait for peers.
    """
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _told(error: BaseException, code: int) -> int:
    print(f"train.py: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return code


def train(argv: Sequence[str]) -> Outcome:
    """Train as the command line says.

    Raises:
        TrainingError, ConfigError: bad input; before any communication, except for what only shows later.
    """
    arguments = parse_arguments(argv)
    run, process = arguments.run, Process.from_environment()
    config = make_config(arguments, process.world_size)
    shape = BatchShape(run.micro_batch_size, run.num_microbatches, config.data_parallel_size or 1, run.seq_length)
    texts = _read_texts(run, shape)
    layout = _layout(run, config)
    find_start(run, layout, [this_agent()], alone=process.local_world_size == process.world_size)
    device = choose_device(run.device, process)
    libraries = choose_libraries(run, config, device, splits_backward(config))
    logging.basicConfig(level=logging.WARNING if process.rank == 0 else logging.ERROR, format="%(message)s")
    with joined(process, device), ExitStack() as opened:
        check_same_flags({**vars(run), **arguments.config})
        start, agents = opened.enter_context(agreed_start(run, layout))
        folder, checkpoint = start.folder, start.checkpoint
        grid = join_grid(config)
        model = build_model(run, config, grid, device, libraries)
        chunks = model.chunks
        # Not before the model is built: what a rank draws while building depends on which layers it holds.
        torch.manual_seed(run.seed * process.world_size + process.rank)
        if run.trace is not None:
            switch_on(chunks[0].config, run.trace, folder, checkpoint.step if checkpoint else 0)
        if process.rank == 0:
            remember(start, agents)
            arguments.save(folder)
        recorder = _make_recorder(run, folder, checkpoint, process.rank)
        for line in (_introduce(config, texts, device), *libraries.told, model.told):
            recorder.say(line)
        writer = CheckpointWriter(folder / "checkpoints", run.keep_checkpoints, layout)
        with StopRequest() as stop:
            try:
                trainer = Trainer(run, chunks, grid, device, texts, writer, recorder, stop, libraries.adam)
                if checkpoint is not None:
                    trainer.load(checkpoint)
                outcome = trainer.train()
            finally:
                recorder.close()
            stop.grant()
            timeline = merge(folder) if run.trace is not None else ""
            if process.rank == 0:
                _conclude(run, folder, outcome, stop)
                if timeline:
                    print(timeline, flush=True)
    return outcome


def _read_texts(run: RunArguments, shape: BatchShape) -> Texts:
    text = read_text(run.data, run.max_data_bytes)
    training, validation = split_text(text, run.validation_fraction)
    return Texts(
        SampleOrder(training, shape, run.seed, "training"),
        SampleOrder(validation, shape, VALIDATION_SEED, "validation"),
        digest=hashlib.sha256(text).hexdigest()[:16],
    )


def _layout(run: RunArguments, config: TransformerConfig) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that loads it, so that the run continues exactly."""
    names = (
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "data_parallel_size",
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
    )
    of_run = (
        "seq_length",
        "micro_batch_size",
        "num_microbatches",
        "untie_embeddings_and_output_weights",
        "seed",
        "transformer_impl",
    )
    return {
        **{name: getattr(config, name) for name in names},
        **{name: getattr(run, name) for name in of_run},
        "placement": config.placement_name,
        "layers_of_stages": config.layers_of_stages(),
        "vocab_size": VOCAB_SIZE,
    }


def _make_recorder(run: RunArguments, folder: Path, checkpoint: Checkpoint | None, rank: int) -> Recorder:
    done = checkpoint.step if checkpoint else 0
    return Recorder(folder if rank == 0 else None, done, run.train_steps, run.log_interval)


def _introduce(config: TransformerConfig, texts: Texts, device: torch.device) -> str:
    size, chunks = config.pipeline_model_parallel_size, config.num_chunks
    grid = f"{size} ranks x {chunks} chunks x {config.data_parallel_size} replicas"
    sizes = f"{len(texts.training.tokens):,} + {len(texts.validation.tokens):,}"
    return (
        f"{config.schedule_name}, {config.lowering_policy} communication, on {device.type}: {grid}, "
        f"{config.num_layers} layers of {config.hidden_size}; {sizes} bytes of text to learn from and to validate on"
    )


def _conclude(run: RunArguments, folder: Path, outcome: Outcome, stop: StopRequest) -> None:
    """Draw the plot, and say how it went."""
    trouble = plot_losses(folder / METRICS, folder / PLOT)
    if trouble is not None:
        print(trouble)
    if outcome.stopped_by is not None:
        cause = outcome.stopped_by.name + ("" if stop.requested else " to another rank")
        print(f"stopped by {cause} after step {outcome.steps} of {run.train_steps}")
        print(f"continue with --resume {folder}")
    else:
        print(f"metrics and plot are in {folder}")
    if math.isnan(outcome.validation_before):
        return
    after = f", {outcome.validation_after:.3f} after {outcome.validated_at} steps" if outcome.validated_at else ""
    print(f"validation loss: {outcome.validation_before:.3f} before{after}", flush=True)

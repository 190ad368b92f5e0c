"""The training program from command line to exit code; ``scripts/train.py`` calls ``main``."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.config import TransformerConfig
from megatron_pp.config_checks import ConfigError
from megatron_pp.errors import ScheduleInputError
from megatron_pp.models.gpt import GPTStage, build_gpt_chunks
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.spec import PlanError
from megatron_pp.training.arguments import ARGUMENTS, Arguments, RunArguments, find_run, make_config, parse_arguments
from megatron_pp.training.checkpoint import Checkpoint, CheckpointWriter, check_layout, find_checkpoint
from megatron_pp.training.data import VOCAB_SIZE, BatchShape, SampleOrder, read_text, split_text
from megatron_pp.training.errors import ArgumentError, TrainingError
from megatron_pp.training.grid import GridMember, Process, choose_device, join_grid, joined
from megatron_pp.training.interrupt import StopRequest
from megatron_pp.training.metrics import METRICS, PLOT, Recorder, plot_losses
from megatron_pp.training.timeline import merge, switch_on
from megatron_pp.training.trainer import Outcome, Texts, Trainer

VALIDATION_SEED = 0
"""Every run validates on the same samples, whatever its own seed."""


def main(argv: Sequence[str]) -> int:
    """Run the program. Returns the exit code: 0, also after Ctrl-C; 2 after bad input, which is told in one line."""
    try:
        train(argv)
    except (TrainingError, ConfigError, ScheduleInputError, PlanError) as error:
        print(f"train.py: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


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
    checkpoint = _checkpoint_to_resume(run, layout)
    folder = _run_folder(run)
    device = choose_device(run.device, process)
    logging.basicConfig(level=logging.WARNING if process.rank == 0 else logging.ERROR, format="%(message)s")
    with StopRequest() as stop, joined(process, device):
        folder = _agreed_folder(folder)
        grid = join_grid(config)
        chunks = _build_chunks(run, config, grid, device)
        # Not before the model is built: what a rank draws while building depends on which layers it holds.
        torch.manual_seed(run.seed * process.world_size + process.rank)
        if run.trace is not None:
            switch_on(chunks[0].config, run.trace, folder, checkpoint.step if checkpoint else 0)
        recorder = _make_recorder(run, arguments, folder, checkpoint, process.rank)
        recorder.say(_introduce(config, texts, device))
        writer = CheckpointWriter(folder / "checkpoints", run.keep_checkpoints, layout)
        try:
            trainer = Trainer(run, chunks, grid, device, texts, writer, recorder, stop)
            if checkpoint is not None:
                trainer.load(checkpoint)
            outcome = trainer.train()
        finally:
            recorder.close()
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
    of_run = ("seq_length", "micro_batch_size", "num_microbatches", "untie_embeddings_and_output_weights", "seed")
    return {
        **{name: getattr(config, name) for name in names},
        **{name: getattr(run, name) for name in of_run},
        "placement": config.placement_name,
        "layers_of_stages": config.layers_of_stages(),
        "vocab_size": VOCAB_SIZE,
    }


def _checkpoint_to_resume(run: RunArguments, layout: dict[str, Any]) -> Checkpoint | None:
    if run.resume is None:
        return None
    checkpoint = find_checkpoint(Path(run.resume))
    check_layout(checkpoint, layout)
    return checkpoint


def _run_folder(run: RunArguments) -> Path:
    """The run's folder, which need not exist yet. Raises ArgumentError if it holds a run or cannot be written."""
    if run.resume is not None:
        return find_run(Path(run.resume))
    folder = Path(run.run_dir or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    if (folder / ARGUMENTS).exists():
        raise ArgumentError(
            f"--run-dir {folder} holds a run already; give another, or --resume {folder} to continue it"
        )
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ArgumentError(
            f"the run's folder {folder} cannot be made, as {existing} is no writable folder; give another --run-dir"
        )
    return folder


def _agreed_folder(folder: Path) -> Path:
    """Rank 0's folder: where it is named after the time, the ranks' clocks may differ."""
    folders: list[Any] = [str(folder)]
    dist.broadcast_object_list(folders, src=0)
    return Path(folders[0])


def _build_chunks(
    run: RunArguments, config: TransformerConfig, grid: GridMember, device: torch.device
) -> list[GPTStage]:
    placement = Placement(config.placement_name, config.pipeline_model_parallel_size, config.num_chunks)
    return build_gpt_chunks(
        config,
        stages=placement.stages[grid.pipeline_rank],
        layers_of_stage=config.layers_of_stages(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=run.seq_length,
        share_embeddings_and_output_weights=not run.untie_embeddings_and_output_weights,
        seed=run.seed,
        device=device,
    )


def _make_recorder(
    run: RunArguments, arguments: Arguments, folder: Path, checkpoint: Checkpoint | None, rank: int
) -> Recorder:
    done = checkpoint.step if checkpoint else 0
    if rank != 0:
        return Recorder(None, done, run.train_steps, run.log_interval)
    folder.mkdir(parents=True, exist_ok=True)
    arguments.save(folder)
    return Recorder(folder, done, run.train_steps, run.log_interval)


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
    if outcome.interrupted:
        cause = stop.signal_name or "a signal to another rank"
        print(f"stopped by {cause} after step {outcome.steps} of {run.train_steps}")
        print(f"continue with --resume {folder}")
    else:
        print(f"metrics and plot are in {folder}")
    after = f", {outcome.validation_after:.3f} after {outcome.validated_at} steps" if outcome.validated_at else ""
    print(f"validation loss: {outcome.validation_before:.3f} before{after}", flush=True)

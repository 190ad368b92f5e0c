"""The training program from command line to exit code; ``scripts/train.py`` calls ``main``."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from examples.gpt import command_line
from examples.gpt.checkpoint import CheckpointWriter
from examples.gpt.data import VOCAB_SIZE, BatchShape, SampleOrder, read_text, split_text
from examples.gpt.distributed import Process, check_same_settings, choose_device, joined
from examples.gpt.errors import TrainingError
from examples.gpt.gpt import GPTStage, build_gpt_chunks
from examples.gpt.interrupt import StopRequest
from examples.gpt.libraries import Libraries, choose_libraries
from examples.gpt.metrics import Recorder
from examples.gpt.optimizer import NamedAdamW
from examples.gpt.plot import plot_losses
from examples.gpt.run_folder import agreed_start, find_start, remember, this_launcher
from examples.gpt.settings import Settings
from examples.gpt.trainer import Texts, Trainer
from megatron_pp import parallel_state
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.errors import ConfigError, PipelineError, PlanError, ScheduleInputError
from megatron_pp.plan.files import write_whole
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.schedule_file import find_family
from megatron_pp.tracing.analysis import analyse
from megatron_pp.tracing.recorder import flush_traces
from megatron_pp.tracing.report import listed, run_page, run_trace
from megatron_pp.tracing.run import load_run, run_names
from megatron_pp.weight_grad import split_weight_grad

VALIDATION_SEED = 0
"""Every run validates on the same samples, whatever its own seed."""


def main(argv: Sequence[str]) -> int:
    """Run the program; its exit code.

    0 when all steps are done; 128 + the signal's number where one, to any rank, ended the run early, with a checkpoint;
    2 bad input; 3 a damaged checkpoint or run to resume; 4 a checkpoint not written; 5 the run's folder is in use; 1
    any other failure. Errors that have a class are reported in one line, with a stack any other.
    """
    try:
        trainer = train(argv)
    except (TrainingError, PipelineError, ConfigError, ScheduleInputError, PlanError) as error:
        print(f"train.py: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", 1 if isinstance(error, PipelineError) else 2)
    except Exception:
        traceback.print_exc()
        return 1
    return 0 if trainer.stopped_by is None else 128 + trainer.stopped_by


def end_process(code: int) -> NoReturn:
    """Leave with ``code``; after a failure without the destructors of process groups, which may wait for peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        os._exit(code)
    sys.exit(code)


def train(argv: Sequence[str]) -> Trainer:
    """Train as the command line says. Bad input is raised before any communication, where one rank can see it."""
    settings, process = command_line.parse(argv), Process.from_environment()
    config = settings.make_config(process.world_size)
    texts, layout = _read_texts(settings, config), _layout(settings, config)
    if process.local_world_size == process.world_size:  # else rank 0's launcher may be on another node
        find_start(settings, layout, this_launcher())
    device = choose_device(settings.device, process)
    libraries = choose_libraries(settings, device, find_family(config.schedule_name).splits_weight)
    logging.basicConfig(level=logging.WARNING if process.rank == 0 else logging.ERROR, format="%(message)s")
    with joined(process, device):
        check_same_settings({**vars(settings), **vars(settings.model), "model": None})
        with agreed_start(settings, layout) as start, StopRequest() as stop:
            folder, first = start.folder, process.rank == 0
            steps_done = start.checkpoint.step if start.checkpoint else 0
            chunks, split = _build_model(settings, config, device, libraries)
            # Not before the model is built: what a rank draws while building depends on which layers it holds.
            torch.manual_seed(settings.seed * process.world_size + process.rank)
            if settings.trace is not None:
                config.trace_dir, config.trace_steps = str(folder / "traces"), settings.trace
                config.trace_first_step = steps_done + 1
            if first:
                remember(start)
                command_line.save(settings, folder)
            steps = (steps_done, settings.train_steps, settings.log_interval)
            recorder = Recorder(folder if first else None, *steps, settings.tensorboard)
            for line in (_introduction(config, texts, device), *libraries.said, split):
                recorder.say(line)
            writer = CheckpointWriter(folder / "checkpoints", settings.keep_checkpoints, layout)
            betas, is_fused = (settings.adam_beta1, settings.adam_beta2), device.type == "cuda"
            adam = libraries.fused_adam
            optimizer = NamedAdamW(chunks, betas, settings.adam_eps, settings.weight_decay, adam, is_fused)
            try:
                trainer = Trainer(settings, chunks, texts, writer, recorder, stop, optimizer, device)
                if start.checkpoint is not None:
                    trainer.load(start.checkpoint)
                trainer.train()
            finally:
                recorder.close()
            stop.granted = True
            timeline = _merge_traces(folder) if settings.trace is not None else ""
            if first:
                # Before the plot: when other ranks have ended, the launcher sends this one a signal too.
                conclusion = _conclusion(trainer, folder)
                print("\n".join(filter(None, (plot_losses(folder), conclusion, timeline))), flush=True)
    return trainer


def _read_texts(settings: Settings, config: TransformerConfig) -> Texts:
    sizes = (settings.micro_batch_size, settings.num_microbatches, config.data_parallel_size or 1, settings.seq_length)
    text = read_text(settings.data, settings.max_data_bytes)
    training, validation = split_text(text, settings.validation_fraction)
    return Texts(
        SampleOrder(training, BatchShape(*sizes), settings.seed, "training"),
        SampleOrder(validation, BatchShape(*sizes), VALIDATION_SEED, "validation"),
        digest=hashlib.sha256(text).hexdigest()[:16],
    )


def _layout(settings: Settings, config: TransformerConfig) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that loads it, so that the run continues exactly."""
    of_config = "pipeline_model_parallel_size virtual_pipeline_model_parallel_size data_parallel_size num_layers"
    of_config += " hidden_size ffn_hidden_size num_attention_heads"
    of_run = "seq_length micro_batch_size num_microbatches untie_embeddings_and_output_weights seed transformer_impl"
    layout = {name: getattr(config, name) for name in of_config.split()}
    layout |= {name: getattr(settings, name) for name in of_run.split()}
    layout |= {"placement": config.placement_name, "layers_of_stages": config.layers_of_stages()}
    return {**layout, "vocab_size": VOCAB_SIZE}


def _build_model(
    settings: Settings, config: TransformerConfig, device: torch.device, libraries: Libraries
) -> tuple[list[GPTStage], str]:
    """This rank's chunks, as the schedule places them and splits their backward, and a line about that. Collective."""
    sizes = config.pipeline_model_parallel_size, config.num_chunks
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        data_parallel_size=config.data_parallel_size,
        pipeline_placement=config.placement_name,
    )
    replicas = parallel_state.get_data_parallel_group()
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = build_gpt_chunks(
        config,
        stages=Placement(config.placement_name, *sizes).stages[rank],
        layers_of_stage=config.layers_of_stages(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=settings.seq_length,
        share_embeddings_and_output_weights=not settings.untie_embeddings_and_output_weights,
        seed=settings.seed,
        device=device,
        parts=libraries.make_parts(replicas if dist.get_world_size(replicas) > 1 else None),
    )
    if not find_family(config.schedule_name).splits_weight:
        return chunks, f"backward: whole, as {config.schedule_name} has no weight-gradient operations"
    return chunks, f"backward: split; of rank {dist.get_rank()}, {split_weight_grad(chunks).report}"


def _introduction(config: TransformerConfig, texts: Texts, device: torch.device) -> str:
    grid = f"{config.pipeline_model_parallel_size} ranks x {config.num_chunks} chunks"
    grid += f" x {config.data_parallel_size} replicas"
    sizes = f"{len(texts.training.tokens):,} + {len(texts.validation.tokens):,}"
    return (
        f"{config.schedule_name}, {config.lowering_policy} communication, on {device.type}: {grid}, "
        f"{config.num_layers} layers of {config.hidden_size}; {sizes} bytes of text to learn from and to validate on"
    )


def _merge_traces(folder: Path) -> str:
    """Put the traces of all ranks into one page, and say where it is. Collective."""
    flush_traces()
    dist.barrier()
    traces, page, chrome = folder / "traces", folder / "timeline.html", folder / "timeline.json"
    names = run_names(traces) if dist.get_rank() == 0 else []
    if not names:
        return "no step of --trace was run"
    try:
        traced = load_run(traces, names[-1])
        write_whole(page, run_page(analyse(traced), traced))
        write_whole(chrome, run_trace(traced))
    except PlanError as error:
        return f"the traces could not be put together: {error}"
    where = f"open {page} in a browser, or {chrome} at https://ui.perfetto.dev"
    return f"timeline of step(s) {listed(traced.steps)}: {where}; in numbers: megatron-pp report {traces}"


def _conclusion(trainer: Trainer, folder: Path) -> str:
    said, stopped_by, validated_at = f"metrics are in {folder}", trainer.stopped_by, trainer.validated_at
    if stopped_by is not None:
        cause = stopped_by.name + ("" if trainer.stop.first else " to another rank")
        steps = f"{trainer.steps_done} of {trainer.settings.train_steps}"
        said = f"stopped by {cause} after step {steps}\ncontinue with --resume {folder}"
    if not math.isnan(trainer.validation_before):
        said += f"\nvalidation loss: {trainer.validation_before:.3f} before"
        said += f", {trainer.validation_after:.3f} after {validated_at} steps" if validated_at > 0 else ""
    return said

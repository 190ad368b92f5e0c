"""The training program from command line to exit code; ``scripts/train.py`` calls ``main``."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from examples.gpt.checkpoint import CheckpointWriter
from examples.gpt.data import VOCAB_SIZE, BatchShape, SampleOrder, read_text, split_text
from examples.gpt.distributed import Process, check_same_settings, choose_device, joined
from examples.gpt.errors import TrainingError, counted
from examples.gpt.gpt import GPTStage, build_gpt_chunks
from examples.gpt.interrupt import StopRequest
from examples.gpt.libraries import Libraries, choose_libraries
from examples.gpt.metrics import Recorder, plot_metrics
from examples.gpt.optimizer import NamedAdamW
from examples.gpt.reports import exit_code_of, report
from examples.gpt.run_folder import Start, agreed_start, find_start, this_launcher
from examples.gpt.settings import Settings, parse, save_settings
from examples.gpt.trainer import Texts, Trainer
from megatron_pp import TransformerConfig, parallel_state, split_weight_grad
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ConfigError, PipelineError, PlanError
from megatron_pp.plan.placement import Placement
from megatron_pp.plan.schedule_file import find_family
from megatron_pp.runtime.measuring import FILE_NAME
from megatron_pp.tracing.recorder import flush_traces
from megatron_pp.tracing.report import listed, write_timeline

LOG = "log.txt"  # beside the metrics
VALIDATION_SEED = 0  # every run validates on the same samples, whatever its own seed


def main(argv: Sequence[str]) -> int:
    """Run the program; its exit code, as listed in the README beside this file."""
    # The launcher sends SIGTERM when another rank has failed: this one still says what it knows of that.
    with StopRequest() as stop:
        try:
            trainer = train(argv, stop)
        except (TrainingError, PipelineError, ConfigError, PlanError) as error:
            report(error, foreseen=True)
            return exit_code_of(error)
        except Exception as error:
            report(error, foreseen=False)
            return 1
    return 0 if trainer.stopped_by is None else 128 + trainer.stopped_by


def end_process(code: int) -> NoReturn:
    """Leave with ``code``; after a failure without the destructors of process groups, which may wait for peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        os._exit(code)
    sys.exit(code)


def train(argv: Sequence[str], stop: StopRequest) -> Trainer:
    """Train as the command line says; signals are noted in ``stop`` from when the ranks have met.

    Bad input is raised before any communication, where one rank can see it."""
    settings, process = parse(argv), Process.from_environment()
    config = settings.make_config(process.world_size)
    texts, layout = _read_texts(settings, config), _layout(settings, config)
    if process.local_world_size == process.world_size:  # else rank 0's launcher may be on another node
        find_start(settings, layout, this_launcher())
    device = choose_device(settings.device, process)
    libraries = choose_libraries(settings, device, find_family(config.schedule_name).splits_weight)
    shown = logging.StreamHandler()
    shown.setLevel(logging.WARNING if process.rank == 0 else logging.ERROR)
    logging.basicConfig(handlers=[shown], format="%(message)s")
    # At least torch's default, and longer than any operation may take: the fault guard's errors come first.
    timeout = timedelta(seconds=max(1800.0, 2 * StepSettings.from_config(config).patience))
    with joined(process, device, timeout):
        check_same_settings(settings.everything())
        with agreed_start(settings, layout) as start:
            stop.begin()
            steps_done = start.checkpoint.step if start.checkpoint else 0
            if settings.trace is not None:
                config.trace_dir, config.trace_steps = str(start.folder / "traces"), settings.trace
                config.trace_first_step = steps_done + 1
            config.measure_out = config.measure_out or str(start.folder / FILE_NAME)
            chunks, split = _build_model(settings, config, device, libraries, timeout)
            if process.rank == 0:
                save_settings(settings, start.folder, this_launcher())
                _keep_log(start.folder)
            folder = start.folder if process.rank == 0 else None
            recorder = Recorder(folder, steps_done, settings)
            sizes = f"{len(texts.training.tokens):,} + {len(texts.validation.tokens):,}"
            text = f"{sizes} bytes of text to learn from and to validate on"
            for line in (_introduction(config, device), text, *libraries.said, split):
                recorder.say(line)
            writer = CheckpointWriter(start.folder / "checkpoints", settings.keep_checkpoints, layout)
            rates = (settings.adam_beta1, settings.adam_beta2), settings.adam_eps, settings.weight_decay
            optimizer = NamedAdamW(chunks, *rates, libraries.fused_adam, fused=device.type == "cuda")
            try:
                trainer = Trainer(settings, chunks, texts, writer, recorder, stop, optimizer, device)
                if start.checkpoint is not None:
                    trainer.load(start.checkpoint)
                trainer.train()
            finally:
                recorder.close()
            stop.granted = True
            _conclude(trainer, start)
    return trainer


def _keep_log(folder: Path) -> None:
    """What the engine logs, with the certificate of each plan that runs, is kept beside the metrics."""
    kept, engine = logging.FileHandler(folder / LOG), logging.getLogger("megatron_pp")
    kept.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    engine.addHandler(kept)
    engine.setLevel(logging.INFO)


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
    """What a checkpoint must have in common with the run that loads it: the model, and what a step is made of.

    Not how the model is cut: ranks, chunks, replicas and the schedule are those of the run that loads."""
    of_config = "num_layers hidden_size ffn_hidden_size num_attention_heads"
    of_run = "seq_length micro_batch_size untie_embeddings_and_output_weights seed transformer_impl"
    layout = {name: getattr(config, name) for name in of_config.split()}
    layout |= {name: getattr(settings, name) for name in of_run.split()}
    microbatches = settings.num_microbatches * (config.data_parallel_size or 1)
    if find_family(config.schedule_name).barriers:  # its rows are tensors of their own
        layout["ranks that share the output layer"] = config.pipeline_model_parallel_size
    return {**layout, "num_microbatches times data_parallel_size": microbatches, "vocab_size": VOCAB_SIZE}


def _build_model(
    settings: Settings, config: TransformerConfig, device: torch.device, libraries: Libraries, timeout: timedelta
) -> tuple[list[GPTStage], str]:
    """This rank's chunks, as the schedule places them and splits their backward, and a line about that. Collective."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        data_parallel_size=config.data_parallel_size,
        pipeline_placement=config.placement_name,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    if config.data_parallel_size != 1:
        libraries.parts.replicas = parallel_state.get_data_parallel_group()
    placement = Placement(config.placement_name, config.pipeline_model_parallel_size, config.num_chunks)
    rank, family = parallel_state.get_pipeline_model_parallel_rank(), find_family(config.schedule_name)
    chunks = build_gpt_chunks(
        config,
        stages=placement.stages[rank],
        layers_of_stage=config.layers_of_stages(),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=settings.seq_length,
        share_embeddings_and_output_weights=not settings.untie_embeddings_and_output_weights,
        seed=settings.seed,
        device=device,
        parts=libraries.parts,
        output_split=(rank, placement.pipeline_size) if family.barriers else None,
    )
    if not family.splits_weight:
        return chunks, f"backward: whole, as {config.schedule_name} has no weight-gradient operations"
    return chunks, f"backward: split; of rank {dist.get_rank()}, {split_weight_grad(chunks).report}"


def _introduction(config: TransformerConfig, device: torch.device) -> str:
    sides = {"rank": config.pipeline_model_parallel_size, "chunk": config.num_chunks}
    sides |= {"replica": config.data_parallel_size or 1}
    grid = " x ".join(counted(number, name) for name, number in sides.items())
    layers = f"{counted(config.num_layers, 'layer')} of {config.hidden_size}"
    return f"{config.schedule_name}, {config.lowering_policy} communication, on {device.type}: {grid}, {layers}"


def _conclude(trainer: Trainer, start: Start) -> None:
    """What rank 0 leaves and says at the end. Collective."""
    folder, timeline = start.folder, ""
    if trainer.settings.trace is not None:
        flush_traces()
        dist.barrier()
    if dist.get_rank() > 0:
        return
    if trainer.settings.trace is not None:
        timeline = _timeline(folder)
    said = [f"metrics are in {folder}"]
    # Asked before the plot: when other ranks have ended, the launcher sends this one a signal too.
    if trainer.stopped_by is not None:
        cause = trainer.stopped_by.name + ("" if trainer.stop.first else " to another rank")
        steps = f"{trainer.steps_done} of {trainer.settings.train_steps}"
        said = [f"stopped by {cause} after step {steps}", f"continue with --resume {folder}"]
    if not math.isnan(trainer.validation_before):
        after = f", {trainer.validation_after:.3f} after {counted(trainer.validated_at, 'step')}"
        said += [f"validation loss: {trainer.validation_before:.3f} before{after if trainer.validated_at > 0 else ''}"]
    no_plot = plot_metrics(folder, _introduction(trainer.config, trainer.device)) if trainer.settings.plot else None
    print("\n".join(filter(None, [no_plot, *said, timeline])), flush=True)


def _timeline(folder: Path) -> str:
    traces, page, chrome = folder / "traces", folder / "timeline.html", folder / "timeline.json"
    try:
        steps = write_timeline(traces, page, chrome)
    except PlanError as error:
        return f"the traces could not be put together: {error}"
    where = f"open {page} in a browser, or {chrome} at https://ui.perfetto.dev"
    name = "step" if len(steps) == 1 else "steps"
    return f"timeline of {name} {listed(steps)}: {where}; in numbers: megatron-pp report {traces}"

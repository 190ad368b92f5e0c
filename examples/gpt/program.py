"""The training program from command line to exit code; ``scripts/train.py`` calls ``main``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.gpt.checkpoint import CheckpointWriter, make_newest
from examples.gpt.data import VOCAB_SIZE, BatchShape, SampleOrder, read_text, split_text
from examples.gpt.errors import TrainingError
from examples.gpt.gpt import GPTStage, build_gpt_chunks
from examples.gpt.libraries import Libraries, choose_libraries
from examples.gpt.metrics import METRICS, Recorder, plot_loss, read_metrics
from examples.gpt.optimizer import NamedAdamW
from examples.gpt.process import Process, StopRequest, check_same_settings, choose_device, joined, on_first_rank, report
from examples.gpt.run_folder import agreed_start, find_start
from examples.gpt.settings import Settings, parse, save_settings
from examples.gpt.trainer import Trainer
from megatron_pp import TransformerConfig, parallel_state, split_weight_grad
from megatron_pp.config.settings import StepSettings
from megatron_pp.draw.facts import counted
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
    try:
        trainer = train(argv)
    except (TrainingError, PipelineError, ConfigError, PlanError) as error:
        return report(error, foreseen=True)
    except Exception as error:
        return report(error, foreseen=False)
    return 0 if trainer.stopped_by is None else 128 + trainer.stopped_by


def train(argv: Sequence[str]) -> Trainer:
    """Train as the command line says. From when the ranks have met, signals end it after a step.

    Bad input is raised before any communication, where one rank can see it."""
    settings, process = parse(argv), Process.from_environment()
    config = settings.make_config(process.world_size)
    samples, layout = _read_samples(settings, config), _layout(settings, config)
    if process.local_world_size == process.world_size:  # else the folder may be on another node
        find_start(settings, layout)
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
            stop = StopRequest()  # the launcher's SIGTERM too: a rank still says what it knows of another's failure
            steps_done = start.checkpoint.step if start.checkpoint else 0
            if settings.trace is not None:
                config.trace_dir, config.trace_steps = str(start.folder / "traces"), settings.trace
                config.trace_first_step = steps_done + 1
            config.measure_out = config.measure_out or str(start.folder / FILE_NAME)
            chunks, split = _build_model(settings, config, device, libraries, timeout)
            if process.rank == 0:
                save_settings(settings, start.folder)
                _keep_log(start.folder)
            recorder = Recorder(start.folder if process.rank == 0 else None, steps_done, settings)
            text = " + ".join(f"{len(order.tokens):,}" for order in samples)
            text += " bytes of text to learn from and to validate on"
            for line in (_introduction(config, device), text, *libraries.said, split):
                recorder.say(line)
            writer = CheckpointWriter(start.folder / "checkpoints", settings.keep_checkpoints, layout)
            optimizer = NamedAdamW(chunks, settings, libraries.fused_adam)
            try:
                trainer = Trainer(settings, chunks, *samples, writer, recorder, stop, optimizer, device)
                if (first := start.checkpoint) is not None:
                    trainer.load(first)
                    if first.path.name == first.name:  # a copy with a name of the user's is never the newest
                        on_first_rank(lambda: make_newest(first.path))
                trainer.train()
            finally:
                recorder.close()
            _conclude(trainer, start.folder)
    return trainer


def _keep_log(folder: Path) -> None:
    """What the engine logs, with the certificate of each plan that runs, is kept beside the metrics."""
    kept, engine = logging.FileHandler(folder / LOG), logging.getLogger("megatron_pp")
    kept.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    engine.addHandler(kept)
    engine.setLevel(logging.INFO)


def _read_samples(settings: Settings, config: TransformerConfig) -> tuple[SampleOrder, SampleOrder]:
    """To learn from, and to validate on."""
    sizes = (settings.micro_batch_size, settings.num_microbatches, config.data_parallel_size or 1, settings.seq_length)
    text, shape = read_text(settings.data, settings.max_data_bytes), BatchShape(*sizes)
    training, validation = split_text(text, settings.validation_fraction)
    return (
        SampleOrder(training, shape, settings.seed, "training"),
        SampleOrder(validation, shape, VALIDATION_SEED, "validation"),
    )


def _layout(settings: Settings, config: TransformerConfig) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that loads it: the model, and what a step is made of.

    Not how the model is cut: ranks, chunks, replicas and the schedule are those of the run that loads."""
    of_config = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    of_run = ("seq_length", "micro_batch_size", "untie_embeddings_and_output_weights", "seed", "transformer_impl")
    layout = {name: getattr(config, name) for name in of_config}
    layout |= {name: getattr(settings, name) for name in of_run}
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


def _conclude(trainer: Trainer, folder: Path) -> None:
    """What rank 0 leaves and says at the end. Collective."""
    settings, said = trainer.settings, [f"metrics are in {folder}"]
    if settings.trace is not None:
        flush_traces()
        dist.barrier()
    if dist.get_rank() > 0:
        return
    # Asked before the plot: when other ranks have ended, the launcher sends this one a signal too.
    if trainer.stopped_by is not None:
        cause = trainer.stopped_by.name + ("" if trainer.stop.first else " to another rank")
        said = [f"stopped by {cause} after step {trainer.steps_done} of {settings.train_steps}"]
        said += [f"continue with --resume {folder}"]
    if losses := [(r["validation_loss"], r["step"]) for r in read_metrics(folder / METRICS) if "validation_loss" in r]:
        (before, first), (after, last) = losses[0], losses[-1]
        said += [f"validation loss: {before:.3f} before"]
        said[-1] += f", {after:.3f} after {counted(last, 'step')}" if last > first else ""
    if settings.trace is not None:
        said.append(_timeline(folder))
    if settings.plot and (no_plot := plot_loss(folder, _introduction(trainer.config, trainer.device))):
        said.insert(0, no_plot)
    print("\n".join(said), flush=True)


def _timeline(folder: Path) -> str:
    traces, page, chrome = folder / "traces", folder / "timeline.html", folder / "timeline.json"
    try:
        steps = listed(write_timeline(traces, page, chrome))
    except PlanError as error:
        return f"the traces could not be put together: {error}"
    where = f"open {page} in a browser, or {chrome} at https://ui.perfetto.dev"
    return f"timeline of steps {steps}: {where}; in numbers: megatron-pp report {traces}"

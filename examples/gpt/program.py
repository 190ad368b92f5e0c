"""The training program from command line to exit code; ``scripts/train.py`` calls ``main``.

If the run's folder has a run of the same settings, the program continues it. So torchrun may start the processes again
with the old command line (``--max-restarts``). Until a resumed run has saved, the checkpoint from which it resumed is
the newest one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from examples.gpt.checkpoint import LATEST, Checkpoint, CheckpointWriter, check_layout, find_checkpoint, make_newest
from examples.gpt.data import VOCAB_SIZE, SampleOrder, read_text, split_text
from examples.gpt.errors import ArgumentError, RunInUseError, TrainingError
from examples.gpt.files import check_own, open_plain
from examples.gpt.gpt import GPTStage, LayerParts, build_gpt_chunks
from examples.gpt.libraries import choose_libraries
from examples.gpt.metrics import METRICS, PLOT, TENSORBOARD, Recorder, plot_loss, read_metrics
from examples.gpt.optimizer import NamedAdamW
from examples.gpt.process import (
    Process,
    StopRequest,
    check_same_settings,
    choose_device,
    joined,
    on_all_ranks,
    on_first_rank,
    report,
)
from examples.gpt.run_page import REPORT, steps_to_record, write_page
from examples.gpt.settings import ARGUMENTS, Settings, find_run, parse, save_settings, saved_values
from examples.gpt.trainer import Trainer
from megatron_pp import TransformerConfig, parallel_state, split_weight_grad
from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ConfigError, PipelineError, PlanError
from megatron_pp.faults.store.processes import process_of
from megatron_pp.features.measuring.measuring import FILE_NAME
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders import find_family
from megatron_pp.tools.draw.facts import counted
from megatron_pp.tools.trace_report import listed, write_timeline
from megatron_pp.tracing.recorder import flush_traces

LOG = "log.txt"  # beside the metrics
LOCK, RUNS = "run.lock", Path(__file__).resolve().parents[2] / "runs"
CHECKPOINTS, TRACES, PAGE, CHROME = "checkpoints", "traces", "timeline.html", "timeline.json"
WRITTEN = (ARGUMENTS, CHECKPOINTS, CHROME, FILE_NAME, LOCK, LOG, METRICS, PAGE, PLOT, REPORT, TENSORBOARD, TRACES)
"""The names that a run writes in its folder."""
VALIDATION_SEED = 0  # every run validates on the same samples, whatever its own seed


def main(argv: Sequence[str]) -> int:
    """Run the program. Returns the exit code; the README beside this file lists them."""
    try:
        trainer = train(argv)
    except (TrainingError, PipelineError, ConfigError, PlanError) as error:
        return report(error, foreseen=True)
    except Exception as error:
        return report(error, foreseen=False)
    return 0 if trainer.stopped_by is None else 128 + trainer.stopped_by


def train(argv: Sequence[str]) -> Trainer:
    """Train as the command line says. After the ranks have met, a signal ends training after the current step.

    Bad input raises before any communication, if one rank can detect it."""
    settings, process = parse(argv), Process.from_environment()
    config = settings.make_config(process.world_size)
    samples, layout = _read_samples(settings, config), _layout(settings, config)
    if process.local_world_size == process.world_size:  # otherwise the folder may be on another node
        find_start(settings, layout)
    device = choose_device(settings.device, process)
    parts, fused_adam, libraries = choose_libraries(settings, device, find_family(config.schedule_name).splits_weight)
    shown = logging.StreamHandler()
    shown.setLevel(logging.WARNING if process.rank == 0 else logging.ERROR)
    logging.basicConfig(handlers=[shown], format="%(message)s")
    # At least torch's default, and longer than any operation may take, so that the fault guard raises first.
    timeout = timedelta(seconds=max(1800.0, 2 * StepSettings.from_config(config).timeouts(None).compute))
    with ExitStack() as until_all_is_closed, joined(process, device, timeout):
        check_same_settings(settings.everything())
        with agreed_start(settings, layout) as start:
            # Also catches the launcher's SIGTERM, so that a rank can still report another rank's failure.
            stop = StopRequest()
            steps_done = start.checkpoint.step if start.checkpoint else 0
            recorded = settings.trace or steps_to_record(steps_done, settings.train_steps)
            if recorded is not None and (settings.trace or config.trace_dir is None):
                config.trace_dir, config.trace_steps = str(start.folder / TRACES), recorded
                config.trace_first_step = steps_done + 1
            config.measure_out = config.measure_out or str(start.folder / FILE_NAME)
            chunks, split = _build_model(settings, config, device, parts, timeout)
            if process.rank == 0:
                save_settings(settings, start.folder)
                until_all_is_closed.enter_context(_kept_log(start.folder))
            recorder = Recorder(start.folder if process.rank == 0 else None, steps_done, settings)
            text = " + ".join(f"{len(order.tokens):,}" for order in samples)
            text += " bytes of text for training and validation"
            for line in (_introduction(config, device), text, *libraries, split):
                recorder.say(line)
            writer = CheckpointWriter(start.folder / CHECKPOINTS, settings.keep_checkpoints, layout)
            optimizer = NamedAdamW(chunks, settings, fused_adam)
            try:
                trainer = Trainer(settings, chunks, *samples, writer, recorder, stop, optimizer, device)
                if (first := start.checkpoint) is not None:
                    trainer.load(first)
                    newest = writer.folder / first.name
                    if os.path.realpath(first.path) == os.path.realpath(newest):  # not a copy under a user's name
                        on_first_rank(lambda: make_newest(newest))
                trainer.train()
            finally:
                recorder.close()
            _conclude(trainer, start.folder)
    return trainer


@contextmanager
def _kept_log(folder: Path) -> Iterator[None]:
    """A context in which the engine's log is written to a file beside the metrics. It has the certificate of each plan
    that runs."""
    kept, engine = logging.FileHandler(folder / LOG), logging.getLogger("megatron_pp")
    kept.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    before = engine.level
    engine.addHandler(kept)
    engine.setLevel(logging.INFO)
    try:
        yield
    finally:
        engine.setLevel(before)
        engine.removeHandler(kept)
        kept.close()


def _read_samples(settings: Settings, config: TransformerConfig) -> tuple[SampleOrder, SampleOrder]:
    """The samples for training, and those for validation."""
    sizes = (settings.micro_batch_size, settings.num_microbatches, config.data_parallel_size or 1, settings.seq_length)
    text = read_text(settings.data, settings.max_data_bytes)
    training, validation = split_text(text, settings.validation_fraction)
    return (
        SampleOrder(training, *sizes, settings.seed, "training"),
        SampleOrder(validation, *sizes, VALIDATION_SEED, "validation"),
    )


def _layout(settings: Settings, config: TransformerConfig) -> dict[str, Any]:
    """The values that a checkpoint and the run that loads it must share: the sizes of the model and of a step.

    How the model is cut may differ: the loading run has its own ranks, chunks, replicas and schedule."""
    of_config = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    of_run = ("seq_length", "micro_batch_size", "untie_embeddings_and_output_weights", "seed", "transformer_impl")
    layout = {name: getattr(config, name) for name in of_config}
    layout |= {name: getattr(settings, name) for name in of_run}
    microbatches = settings.num_microbatches * (config.data_parallel_size or 1)
    if find_family(config.schedule_name).barriers:  # the rows of each rank are a tensor of their own
        layout["ranks that share the output layer"] = config.pipeline_model_parallel_size
    return {**layout, "num_microbatches times data_parallel_size": microbatches, "vocab_size": VOCAB_SIZE}


def _build_model(
    settings: Settings, config: TransformerConfig, device: torch.device, parts: LayerParts, timeout: timedelta
) -> tuple[list[GPTStage], str]:
    """This rank's chunks, placed and split as the schedule needs, and a line that describes the backward.
    Collective."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        data_parallel_size=config.data_parallel_size,
        pipeline_placement=config.placement_name,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    if config.data_parallel_size != 1:
        parts.replicas = parallel_state.get_data_parallel_group()
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
        parts=parts,
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
    """Write the report and print the last lines, on rank 0. Collective."""
    settings, said = trainer.settings, [f"metrics are in {folder}"]
    flush_traces()
    dist.barrier()  # all ranks have written their traces
    if dist.get_rank() > 0:
        return
    # Read before the pages are written: after other ranks have ended, the launcher also sends this rank a signal.
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
    title, traces = _introduction(trainer.config, trainer.device), Path(trainer.config.trace_dir or folder / TRACES)
    no_plot = plot_loss(folder, title) if settings.plot else ""
    said += [no_plot] if no_plot else []
    drawn = f", its loss alone in {folder / PLOT}" if no_plot is None else ""
    more = "" if settings.trace else ", other steps with --trace 3,10-12"
    said += [f"report: open {write_page(folder, traces, title)} in a browser{drawn}{more}"]
    if (folder / TENSORBOARD).exists():
        said += [f"TensorBoard: tensorboard --logdir {folder / TENSORBOARD}"]
    print("\n".join(said), flush=True)


def _timeline(folder: Path) -> str:
    traces, page, chrome = folder / TRACES, folder / PAGE, folder / CHROME
    try:
        steps = listed(write_timeline(traces, page, chrome))
    except PlanError as error:
        return f"the traces could not be merged: {error}"
    where = f"open {page} in a browser, or {chrome} at https://ui.perfetto.dev"
    return f"timeline of steps {steps}: {where}; in numbers: megatron-pp report {traces}"


class Start(NamedTuple):
    """Where a run begins. ``folder`` need not exist. ``checkpoint``: None for a new run."""

    folder: Path
    checkpoint: Checkpoint | None = None


def find_start(settings: Settings, layout: dict[str, Any], again: bool = False) -> Start:
    """Where the run of these settings begins. ``again``: whether torchrun has restarted it. Raises ArgumentError if the
    folder has another run, and CheckpointError if the checkpoint is missing or of another layout."""
    folder, checkpoint = _folder_of(settings), None
    if settings.resume is not None:
        checkpoint = find_checkpoint(Path(settings.resume))
        if again and checkpoint.path.name == checkpoint.name:  # a copy under another name is never the newest one
            checkpoint = find_checkpoint(folder)
    elif (folder / ARGUMENTS).exists():
        if saved_values(folder) != settings.to_save():
            advice = f"give another folder, or --resume {folder} with the changed settings"
            raise ArgumentError(f"--run-dir {folder} holds a run of other settings; {advice}")
        if (folder / CHECKPOINTS / LATEST).exists():
            checkpoint = find_checkpoint(folder)
    if checkpoint is not None:
        check_layout(checkpoint, layout)
    return Start(folder, checkpoint)


@contextmanager
def agreed_start(settings: Settings, layout: dict[str, Any]) -> Iterator[Start]:
    """A context with the result of ``find_start`` on rank 0: other ranks may see an older state of a shared folder. The
    folder is locked in the context. Collective. Errors are raised on every rank."""
    with ExitStack() as held:

        def begin() -> Start:
            file, launcher = held.enter_context(lock_folder(_folder_of(settings))), _launcher()
            # torchrun's restart count is not enough: an agent does not count restarts that another agent caused.
            start = find_start(settings, layout, again="TORCHELASTIC_RUN_ID" in os.environ and file.read() == launcher)
            file.seek(0)
            file.truncate()
            file.write(launcher)
            file.flush()
            return start

        start: Start = on_first_rank(begin)
        on_all_ranks(lambda: (start.folder / LOCK).stat())  # every node must see the folder
        yield start


def lock_folder(folder: Path) -> IO[bytes]:
    """Make a run's folder, and lock it until the file is closed or the process ends, for whatever reason. Does not
    wait. Raises RunInUseError if another run has it, and ArgumentError if the file cannot be used or the run would
    write elsewhere."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_own(folder, WRITTEN)
        file = open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ArgumentError(f"the run's folder cannot be used: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        advice = "wait until that run has ended, or end it, or give another --run-dir"
        raise RunInUseError(f"the run's folder {folder} is in use by another run; {advice}") from None
    except OSError as error:  # a file system without locks
        warnings.warn(f"{folder} cannot be locked ({error}): do not start a second run in it", stacklevel=2)
    return file


def _folder_of(settings: Settings) -> Path:
    if settings.resume is not None:
        return find_run(Path(settings.resume))
    if settings.run_dir is not None:
        return Path(settings.run_dir)
    name = _launcher().decode()
    return next(RUNS.glob(f"*-{name}"), RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")


def _launcher() -> bytes:
    """The id and start time of torchrun's process, which outlives its ranks. Without torchrun, those of this
    process."""
    process = process_of(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
    return f"{process.pid}-{process.started}".encode()

"""All settings of a run. A field is a flag of the same name, the comment beside it is its line in ``--help``.

Flags override a TOML file, which overrides what a resumed run remembers.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import sys
import typing
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from examples.gpt.errors import ArgumentError, CheckpointError, NoCheckpointError
from examples.gpt.files import read_text, write_atomically
from examples.gpt.gpt import check_model_config
from megatron_pp import TransformerConfig, build_plan
from megatron_pp.config.parallel_grid import fit_grid
from megatron_pp.errors import PlanError, ScheduleInputError
from megatron_pp.plan.schedule_file import find_family, names_a_file
from megatron_pp.plan.slice_costs import slice_lengths
from megatron_pp.plan.spec import PlanSpec
from megatron_pp.runtime.pairs import PAIR_FUNCTIONS
from megatron_pp.tracing.recorder import chosen_steps

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ARGUMENTS = "arguments.json"
# Where this program's default is not the config's.
_DEFAULTS: dict[str, float] = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4}
_DEFAULTS |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Fields of TransformerConfig that this program sets itself, or that this GPT has no use for.
_NOT_FLAGS = {
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype", "kv_channels"),
    *("defer_embedding_wgrad_compute", "barrier_with_L1_time"),
}
_CHUNKS = 2  # of schedules that take any number, where none is given
# tyro wants a value for a switch that may also be None.
_SWITCHES = {"--batch-p2p-comm": "--batch-p2p-comm=True", "--no-batch-p2p-comm": "--batch-p2p-comm=False"}


def _flag(option: dataclasses.Field[Any], hint: Any) -> tuple[str, Any, Any]:
    """The field for one option of TransformerConfig."""
    if str in typing.get_args(hint):  # whatever else it may be, on a command line it is text
        hint = str | None
    if choices := option.metadata["choices"]:
        literal: Any = Literal[choices]
        hint = literal if hint is str else literal | None
    if option.default_factory is not MISSING:  # read from the environment
        copied = field(default_factory=option.default_factory)
    else:
        copied = field(default=_DEFAULTS.get(option.name, option.default))
    return option.name, Annotated[hint, tyro.conf.arg(help=option.metadata["help"])], copied


_HINTS = typing.get_type_hints(TransformerConfig)
_OPTIONS = [f for f in dataclasses.fields(TransformerConfig) if f.metadata["cli"] and f.name not in _NOT_FLAGS]
ModelOptions: Any = dataclasses.make_dataclass("ModelOptions", [_flag(f, _HINTS[f.name]) for f in _OPTIONS])
"""Every option of the model and of the pipeline engine, as ``TransformerConfig`` defines it."""


@dataclass
class Settings:
    """Trains a byte-level GPT through a pipeline. Run it under torchrun, or alone for one process."""

    config: str | None = None  # TOML file of settings, as in num_layers = 8; flags override it
    run_dir: str | None = None  # the run's folder, new; None: <date and time> in the project's runs/
    resume: str | None = None  # continue the run in this folder, or from this checkpoint; its settings are remembered

    data: tuple[str, ...] = ()  # files and folders of text; none: the source of Python's standard library
    max_data_bytes: int = 16 * 2**20  # read no more text than this
    validation_fraction: float = 0.05  # share of the text, at its end, that is kept for validation
    seq_length: int = 128  # tokens (bytes) in a sample
    micro_batch_size: int = 4  # samples in a microbatch
    num_microbatches: int = 8  # microbatches of each replica in a step

    pipeline_model_parallel_size: int | None = None  # P, ranks of a pipeline; None: all that the replicas leave
    overlap_pairs: Literal["in_turn", "on_two_streams"] | None = None  # run an adjacent forward and backward as one

    train_steps: int = 400  # optimizer steps
    learning_rate: float = 3e-3  # peak learning rate of AdamW
    min_learning_rate: float = 3e-4  # learning rate at the last step
    warmup_steps: int = 20  # steps in which the learning rate rises to its peak
    weight_decay: float = 0.1  # decay of matrices
    adam_beta1: float = 0.9  # AdamW's first beta
    adam_beta2: float = 0.95  # AdamW's second beta
    adam_eps: float = 1e-8  # AdamW's epsilon
    clip_grad: float = 1.0  # largest norm of the whole gradient; 0: no clipping
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: compute and send in bf16, with fp32 weights
    untie_embeddings_and_output_weights: bool = False  # give the output projection weights of its own
    seed: int = 1234  # seed of weights, sample order and dropout

    transformer_impl: Literal["local", "transformer_engine"] = "local"  # what the layers are built from
    fp8: Literal["e4m3", "hybrid"] | None = None  # compute layers in FP8, in this format; needs Transformer Engine
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"  # how FP8 is scaled
    norm_impl: Literal["auto", "torch", "apex", "transformer_engine"] = "auto"  # auto: fused norms, if any, on a GPU
    optimizer_impl: Literal["auto", "torch", "apex"] = "auto"  # whose AdamW; auto: apex's, if there, on a GPU
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs when every process has one

    eval_interval: int = 100  # steps between validations; 0: only before and after
    eval_steps: int = 4  # global batches in a validation
    save_interval: int = 100  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2  # newest checkpoints that are kept
    log_interval: int = 20  # steps between two lines on the terminal
    tensorboard: bool = True  # write TensorBoard's files beside metrics.jsonl, where it is installed
    plot: bool = True  # draw the metrics at the end, where matplotlib is installed
    wandb: str | None = None  # project of Weights & Biases to log to; WANDB_MODE=offline keeps it in the run's folder
    peak_tflops: float | None = None  # of one device, for MFU; None: known for V100, A100, H100, H200, B200 in bf16
    trace: str | None = None  # record the pipeline's timeline in these training steps, as in 3,10-12, and draw it

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    def check(self) -> None:
        """Raises ArgumentError where a value is impossible; the sentence says what would be right."""
        positive = "seq_length micro_batch_size num_microbatches eval_steps log_interval keep_checkpoints"
        positive += " max_data_bytes"
        not_negative = "train_steps warmup_steps eval_interval save_interval clip_grad weight_decay seed"
        for name in f"{positive} {not_negative}".split():
            value, least = getattr(self, name), int(name in positive)
            if not value >= least:  # so that not-a-number fails too
                raise ArgumentError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
        if not 0.0 < self.learning_rate < float("inf"):
            raise ArgumentError(f"--learning-rate is {self.learning_rate}; it must be a positive number such as 3e-3")
        if not 0.0 <= self.min_learning_rate <= self.learning_rate:
            legal = f"between 0 and --learning-rate {self.learning_rate}"
            raise ArgumentError(f"--min-learning-rate is {self.min_learning_rate}; it must lie {legal}")
        if not 0.0 < self.validation_fraction < 1.0:
            raise ArgumentError(f"--validation-fraction is {self.validation_fraction}; it must lie between 0 and 1")
        if self.run_dir is not None and self.resume is not None:
            raise ArgumentError("--run-dir and --resume are both given; a resumed run stays in its folder: give one")
        if self.trace is not None:
            try:
                last = max(chosen[-1] for chosen in chosen_steps(self.trace))
            except ScheduleInputError:
                raise ArgumentError(f"--trace is {self.trace!r}; it must list steps, as in 3,10-12") from None
            if last > self.train_steps:
                raise ArgumentError(f"--trace is {self.trace}, but the run ends after step {self.train_steps}")
        if not 0 <= self.model.measure < max(self.train_steps, 1):
            raise ArgumentError(
                f"--measure is {self.model.measure}; it must be at least 0, and below --train-steps "
                f"({self.train_steps}), as the first step is not measured"
            )
        if self.wandb is not None and importlib.util.find_spec("wandb") is None:
            raise ArgumentError(
                f"--wandb is {self.wandb}, but wandb is not installed; install it, or leave --wandb out"
            )

    def make_config(self, world_size: int) -> TransformerConfig:
        """The engine's config on ``world_size`` processes. Raises ConfigError, or PlanError for a schedule file."""
        options = dict(vars(self.model))
        replicas = options.pop("data_parallel_size")
        pipeline_size = self.pipeline_model_parallel_size
        if pipeline_size is None:
            pipeline_size = max(world_size // (replicas or 1), 1)
        grid = fit_grid(world_size, pipeline_parallel=pipeline_size, data_parallel=replicas)
        if options["virtual_pipeline_model_parallel_size"] is None and options["pipeline_schedule"] is not None:
            with suppress(PlanError):  # the config refuses the name
                chunks = find_family(options["pipeline_schedule"]).chunks or _CHUNKS
                options["virtual_pipeline_model_parallel_size"] = chunks if chunks > 1 else None
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        config = TransformerConfig(
            pipeline_model_parallel_size=grid.pipeline_parallel,
            data_parallel_size=grid.data_parallel,
            pipeline_dtype=dtype,
            enable_autocast=dtype != torch.float32,
            autocast_dtype=dtype,
            overlapped_forward_backward=None if self.overlap_pairs is None else PAIR_FUNCTIONS[self.overlap_pairs],
            **options,
        )
        check_model_config(config)
        if names_a_file(config.schedule_name):  # which may hold anything: verified before any communication
            family, sizes = find_family(config.schedule_name), (grid.pipeline_parallel, config.num_chunks)
            lowering: dict[str, Any] = {"policy": config.lowering_policy, "channels": config.p2p_channels}
            lowering |= {"variable_shapes": config.variable_seq_lengths, "digest": family.digest}
            lowering |= {"slices": config.sequence_slices}
            build_plan(PlanSpec(family.name, *sizes, self.num_microbatches, **lowering))
        self._check_slices(config)
        return config

    def _check_slices(self, config: TransformerConfig) -> None:
        attention = 0.5 if config.balance_sequence_slices else 0.0  # whatever it is: any lengths will do then
        try:
            slice_lengths(self.seq_length, config.sequence_slices, attention)
        except PlanError as error:
            raise ArgumentError(f"--sequence-slices: {error}; --seq-length is {self.seq_length}") from error

    def everything(self) -> dict[str, Any]:
        """All settings, those of the model too, by name."""
        return {name: value for name, value in (vars(self) | vars(self.model)).items() if name != "model"}


_FIELDS = (*dataclasses.fields(Settings), *dataclasses.fields(ModelOptions))
# A schedule brings its own, unless they are given.
_BROUGHT = {"virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage", "overlap_pairs"}
# Fields with a factory are read from the environment, anew at each start.
_SAVED = {f.name for f in _FIELDS if f.default is not MISSING} - {"config", "run_dir", "resume", "trace"}


def parse(argv: Sequence[str]) -> Settings:
    """The settings that a command line asks for.

    Raises:
        ArgumentError: an unknown flag or an impossible value.
        CheckpointError: ``--resume`` names no run, or one whose settings are damaged.
    """
    settings = _parse(argv)
    given: list[str] = []
    if settings.config is not None:
        try:
            given = _flags_of(tomllib.loads(Path(settings.config).read_text(encoding="utf-8")))
            _parse(given)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--config is {settings.config}, which cannot be used: {error}") from error
        settings = _parse([*given, *argv])
    if settings.resume is not None and settings.run_dir is None:
        file = find_run(Path(settings.resume)) / ARGUMENTS
        try:
            content = json.loads(read_text(file))
            forgotten = _BROUGHT if any(flag.startswith("--pipeline-schedule") for flag in [*given, *argv]) else set()
            saved = _flags_of({name: value for name, value in content.items() if name in _SAVED - forgotten})
            _parse(saved)
        except (OSError, ValueError, AttributeError, RecursionError, ArgumentError) as error:
            advice = "give all flags and a new --run-dir"
            raise CheckpointError(f"{file} cannot be read ({error}); {advice}") from error
        settings = _parse([*saved, *given, *argv])
    settings.check()
    return settings


def save_settings(settings: Settings, folder: Path, launcher: str) -> None:
    """Write the settings to ``folder`` for a later ``--resume``, which may be given in another directory. ``launcher``:
    what has started the run; see run_folder.py."""
    content = {name: value for name, value in settings.everything().items() if name in _SAVED}
    content |= {"data": [str(Path(path).absolute()) for path in settings.data], "launcher": launcher}
    for name in ("pipeline_schedule", "pipeline_measured"):
        if content[name] is not None and (name == "pipeline_measured" or names_a_file(content[name])):
            content[name] = str(Path(content[name]).absolute())
    write_atomically(folder / ARGUMENTS, json.dumps(dict(sorted(content.items())), indent=1) + "\n")


def launcher_of(folder: Path) -> str:
    """What has started the run in ``folder`` last; empty where there is none, or its settings cannot be read."""
    try:
        return str(json.loads(read_text(folder / ARGUMENTS))["launcher"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ""


def find_run(path: Path) -> Path:
    """The run's folder, given it or something in it. Raises NoCheckpointError if there is none."""
    # os.path: a link to itself, or a name that no file can have, is no run.
    for folder in (path, *Path(os.path.realpath(path)).parents[:2]):
        if os.path.isfile(folder / ARGUMENTS):
            return folder
    raise NoCheckpointError(f"there is no run at {path}; give a run's folder, which has {ARGUMENTS} in it")


def _parse(argv: Sequence[str]) -> Settings:
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(Settings, args=[_SWITCHES.get(flag, flag) for flag in argv], prog="train.py")
    except SystemExit as end:
        if not end.code:  # --help
            raise
        # What stands before the first rule of tyro's box, in one line: every rank says it.
        lines = [line.strip("│ ") for line in said.getvalue().splitlines() if line[:1] not in "╭╰"]
        sentence = " ".join(lines[: next((i for i, line in enumerate(lines) if line.startswith("─")), None)])
        raise ArgumentError(f"{sentence.rstrip('.')} (--help lists all flags)") from None


def _flags_of(values: dict[str, Any]) -> list[str]:
    """``{"seed": 1, "model": {"bias": True}}`` as ``--seed=1 --bias``."""
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, dict):
            flags += _flags_of(value)
        elif isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            if any(str(part).startswith("-") for part in value):  # it would be read as a flag
                raise ValueError(f"{name} holds {value!s:.60}; no part may begin with '-'")
            flags += [flag, *map(str, value)]
        else:
            flags.append(f"{flag}={value}")
    return flags

"""All settings of a run. Each field is a flag of the same name. The comment beside it is its line in ``--help``.

Flags override a TOML file, which overrides what a resumed run remembers.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
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
from megatron_pp import TransformerConfig, build_plan
from megatron_pp.config.conversions import chosen_steps
from megatron_pp.config.parallel_grid import fit_grid
from megatron_pp.errors import PlanError
from megatron_pp.features.pairs.pair_runner import PAIR_FUNCTIONS
from megatron_pp.features.slices.slice_costs import slice_lengths
from megatron_pp.integrations.megatron.settings_file import parse_toml
from megatron_pp.plan.costs.files import read_text as read_any_text
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import find_family, names_a_file

ARGUMENTS = "arguments.json"
# Defaults of this program that differ from the config's.
_DEFAULTS: dict[str, float] = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4}
_DEFAULTS |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Fields of TransformerConfig that this program sets itself, or that this GPT does not use.
_NOT_FLAGS = {
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype", "kv_channels"),
    *("defer_embedding_wgrad_compute", "barrier_with_L1_time", "calculate_per_token_loss"),
}
_CHUNKS = 2  # chunks of a schedule that allows any number, if none is given
# Smallest legal values.
_LEAST = dict.fromkeys(("seq_length", "micro_batch_size", "num_microbatches", "max_data_bytes"), 1)
_LEAST |= dict.fromkeys(("eval_steps", "log_interval", "keep_checkpoints"), 1)
_LEAST |= dict.fromkeys(("train_steps", "warmup_steps", "eval_interval", "save_interval", "seed"), 0)
_LEAST |= dict.fromkeys(("learning_rate", "min_learning_rate", "clip_grad", "weight_decay", "validation_fraction"), 0)
# tyro requires a value for a switch that may also be None.
_SWITCHES = {"--batch-p2p-comm": "--batch-p2p-comm=True", "--no-batch-p2p-comm": "--batch-p2p-comm=False"}


def _flag(option: dataclasses.Field[Any], hint: Any) -> tuple[str, Any, Any]:
    """The dataclass field for one option of TransformerConfig."""
    if str in typing.get_args(hint):  # on a command line it is text, whatever else it may be
        hint = str | None
    kind = option.metadata["kind"]
    if kind is not None and kind.choices:
        literal: Any = Literal[kind.choices]
        hint = literal if hint is str else literal | None
    if option.default_factory is not MISSING:  # read from the environment
        copied = field(default_factory=option.default_factory)
    else:
        copied = field(default=_DEFAULTS.get(option.name, option.default))
    return option.name, Annotated[hint, tyro.conf.arg(help=option.metadata["help"])], copied


_HINTS = typing.get_type_hints(TransformerConfig)
# Options that are objects in a program, and text on a command line.
_HINTS |= dict.fromkeys(("pipeline_measured", "skip_tensors", "pipeline_model_parallel_layout"), str | None)
_OPTIONS = [f for f in dataclasses.fields(TransformerConfig) if f.metadata["cli"] and f.name not in _NOT_FLAGS]
ModelOptions: Any = dataclasses.make_dataclass("ModelOptions", [_flag(f, _HINTS[f.name]) for f in _OPTIONS])
"""Every option of the model and of the pipeline engine, as ``TransformerConfig`` defines it."""


@dataclass
class Settings:
    """Trains a byte-level GPT through a pipeline. Run it under torchrun, or alone for one process."""

    config: str | None = None  # TOML file of settings, as in num_layers = 8; flags override it
    run_dir: str | None = None  # folder of a new run; None: <date and time> in the project's runs/
    resume: str | None = None  # continue the run in this folder, or from this checkpoint, with its saved settings

    data: tuple[str, ...] = ()  # files and folders of text; none: the source of Python's standard library
    max_data_bytes: int = 16 * 2**20  # most bytes of text to read
    validation_fraction: float = 0.05  # share of the text, from its end, that is used for validation
    seq_length: int = 128  # tokens (bytes) in a sample
    micro_batch_size: int = 4  # samples in a microbatch
    num_microbatches: int = 8  # microbatches of each replica in a step

    pipeline_model_parallel_size: int | None = None  # P, ranks of a pipeline; None: all ranks of a replica
    overlap_pairs: Literal["in_turn", "on_two_streams"] | None = None  # run an adjacent forward and backward as one

    train_steps: int = 400  # optimizer steps
    learning_rate: float = 3e-3  # peak learning rate of AdamW
    min_learning_rate: float = 3e-4  # learning rate at the last step
    warmup_steps: int = 20  # steps in which the learning rate rises to its peak
    weight_decay: float = 0.1  # weight decay of matrices
    adam_beta1: float = 0.9  # AdamW's first beta
    adam_beta2: float = 0.95  # AdamW's second beta
    adam_eps: float = 1e-8  # AdamW's epsilon
    clip_grad: float = 1.0  # largest norm of the whole gradient; 0: no clipping
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: compute and send in bf16, with fp32 weights
    untie_embeddings_and_output_weights: bool = False  # give the output projection its own weights
    seed: int = 1234  # seed of weights, sample order and dropout

    transformer_impl: Literal["local", "transformer_engine"] = "local"  # library of the layers
    fp8: Literal["e4m3", "hybrid"] | None = None  # compute layers in FP8, in this format; needs Transformer Engine
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"  # how FP8 is scaled
    norm_impl: Literal["auto", "torch", "apex"] = "auto"  # library of the norms; auto: apex on a GPU, if installed
    optimizer_impl: Literal["auto", "torch", "apex"] = "auto"  # library of AdamW; auto: apex on a GPU, if installed
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: GPUs if there is one for every process

    eval_interval: int = 100  # steps between validations; 0: only before and after training
    eval_steps: int = 4  # global batches in a validation
    save_interval: int = 100  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2  # number of newest checkpoints to keep
    log_interval: int = 20  # steps between two lines on the terminal
    tensorboard: bool = True  # write TensorBoard's files beside metrics.jsonl, if it is installed
    plot: bool = True  # draw the losses at the end, if matplotlib is installed
    peak_tflops: float | None = None  # peak TFLOPS of one device, for MFU; None: that of common GPUs in bf16
    trace: str | None = None  # record the pipeline's timeline in these training steps, as in 3,10-12, and draw it

    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)

    def check(self) -> None:
        """Raises ArgumentError if a value is impossible. The message says which values are legal."""
        most = {"validation_fraction": 1.0, "min_learning_rate": self.learning_rate}
        for name, least in _LEAST.items():
            value, limit = getattr(self, name), most.get(name, math.inf)
            if not (least <= value <= limit and value < math.inf):
                legal = f"at least {least}" if limit == math.inf else f"between {least} and {limit}"
                raise ArgumentError(f"--{name.replace('_', '-')} is {value}; it must be {legal}")
        if self.run_dir is not None and self.resume is not None:
            raise ArgumentError("--run-dir and --resume are both given; a resumed run stays in its folder: give one")
        if self.trace is not None and max(steps[-1] for steps in chosen_steps(self.trace)) > self.train_steps:
            raise ArgumentError(f"--trace is {self.trace}, but the run ends after step {self.train_steps}")

    def make_config(self, world_size: int) -> TransformerConfig:
        """The engine's config on ``world_size`` processes. Raises ConfigError, or PlanError for a schedule file."""
        options = dict(vars(self.model))
        replicas = options.pop("data_parallel_size")
        pipeline_size = self.pipeline_model_parallel_size
        if pipeline_size is None:
            pipeline_size = max(world_size // (replicas or 1), 1)
        grid = fit_grid(world_size, pipeline_parallel=pipeline_size, data_parallel=replicas)
        if options["virtual_pipeline_model_parallel_size"] is None and options["pipeline_schedule"] is not None:
            with suppress(PlanError):  # the config raises for the unknown name
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
        if (config.hidden_size // config.num_attention_heads) % 2:
            heads = f"--hidden-size {config.hidden_size} over --num-attention-heads {config.num_attention_heads}"
            raise ArgumentError(f"{heads} gives heads of an odd width; rotary positions need an even width")
        if names_a_file(config.schedule_name):  # the file may hold any plan, so it is verified before any communication
            family, sizes = find_family(config.schedule_name), (grid.pipeline_parallel, config.num_chunks)
            lowering: dict[str, Any] = {"policy": config.lowering_policy, "channels": config.p2p_channels}
            lowering |= {"variable_shapes": config.variable_seq_lengths, "slices": config.sequence_slices}
            build_plan(PlanSpec(family.name, *sizes, self.num_microbatches, digest=family.digest, **lowering))
        # This only checks that slices are possible, so the assumed cost of attention does not matter.
        slice_lengths(self.seq_length, config.sequence_slices, 0.5 if config.balance_sequence_slices else 0.0)
        return config

    def everything(self) -> dict[str, Any]:
        """All settings, those of the model too, by name."""
        return {name: value for name, value in (vars(self) | vars(self.model)).items() if name != "model"}

    def to_save(self) -> dict[str, Any]:
        """The settings that a later ``--resume`` reads. It may run in another directory."""
        values = {name: value for name, value in self.everything().items() if name in _SAVED}
        values["data"] = [os.path.abspath(path) for path in self.data]
        for name in ("pipeline_schedule", "pipeline_measured"):
            if values[name] is not None and (name == "pipeline_measured" or names_a_file(values[name])):
                values[name] = os.path.abspath(values[name])
        return values


_FIELDS = (*dataclasses.fields(Settings), *dataclasses.fields(ModelOptions))
# A schedule sets these, unless they are given.
_BROUGHT = {"virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage", "overlap_pairs"}
# Fields with a factory are read from the environment at each start.
_SAVED = {f.name for f in _FIELDS if f.default is not MISSING} - {"config", "run_dir", "resume", "trace"}


def parse(argv: Sequence[str]) -> Settings:
    """The settings of a command line.

    Raises:
        ArgumentError: an unknown flag or an impossible value.
        CheckpointError: ``--resume`` names no run, or one whose settings are damaged.
    """
    settings, given = _parse(argv), [*argv]
    if settings.config is not None:
        try:
            of_file = _flags_of(parse_toml(read_any_text(settings.config)))
            _parse(of_file)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"--config is {settings.config}, which cannot be used: {error}") from error
        given = [*of_file, *argv]
        settings = _parse(given)
    if settings.resume is not None and settings.run_dir is None:
        values = saved_values(find_run(Path(settings.resume)))
        if any(flag.startswith("--pipeline-schedule") for flag in given):
            values = {name: value for name, value in values.items() if name not in _BROUGHT}
        settings = _parse([*_flags_of(values), *given])
    settings.check()
    return settings


def save_settings(settings: Settings, folder: Path) -> None:
    write_atomically(folder / ARGUMENTS, json.dumps(settings.to_save(), indent=1, sort_keys=True) + "\n")


def saved_values(folder: Path) -> dict[str, Any]:
    """The values that ``save_settings`` has written to ``folder``. Raises CheckpointError."""
    file = folder / ARGUMENTS
    try:
        values = {name: value for name, value in json.loads(read_text(file)).items() if name in _SAVED}
        _parse(_flags_of(values))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); give all flags, and a new --run-dir") from error
    return values


def find_run(path: Path) -> Path:
    """The run's folder for ``path``, which is this folder or is in it. Raises NoCheckpointError if there is no run."""
    # os.path does not raise for a link to itself, or for a name that no file can have. The path as named comes first,
    # so that a link in a run's folder does not lead to another run.
    real, named = Path(os.path.realpath(path)), Path(os.path.abspath(path))
    for folder in (path, *named.parents[:2], *real.parents[:2]):
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
        # Every rank prints this, so it is one line: the text between the rules of tyro's box. Flags may follow the
        # first rule.
        _, sentence, *rest = re.split("[─-]{3,}", re.sub("[│╭╮]", " ", said.getvalue()))
        near = re.findall(r"^ *(--[\w-]+)", rest[0] if rest else "", re.MULTILINE)
        nearest = f"did you mean {' or '.join(near)}? " if near else ""
        raise ArgumentError(f"{' '.join(sentence.split()).rstrip('.')} ({nearest}--help lists all flags)") from None


def _flags_of(values: dict[str, Any]) -> list[str]:
    """The values as flags: ``{"seed": 1, "model": {"bias": True}}`` gives ``--seed=1 --bias``."""
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, dict):
            flags += _flags_of(value)
        elif isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            if any(str(part).startswith("-") for part in value):  # would be read as a flag
                raise ValueError(f"{name} holds {value!s:.60}; no part may begin with '-'")
            flags += [flag, *map(str, value)]
        else:
            flags.append(f"{flag}={value}")
    return flags

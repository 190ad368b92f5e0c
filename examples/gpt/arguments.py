"""The training program's command line: one dataclass of its own, and the flags of ``TransformerConfig``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from examples.gpt.errors import ArgumentError, CheckpointError, NoCheckpointError
from examples.gpt.files import read_text, write_atomically
from examples.gpt.flags import add_flags, values_of
from examples.gpt.gpt import check_model_config
from examples.gpt.grid import grid_sizes
from examples.gpt.timeline import check_trace_steps
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.plan.build import build_plan
from megatron_pp.plan.schedule_file import find_family, names_a_file
from megatron_pp.plan.spec import PlanError, PlanSpec
from megatron_pp.runtime.pairs import in_turn, on_two_streams

ARGUMENTS = "arguments.json"

# Fields of TransformerConfig that are no flags here, and why.
_NOT_FLAGS = {
    **dict.fromkeys(
        ("tensor_model_parallel_size", "context_parallel_size", "sequence_parallel"),
        "this GPT is cut by layers only",
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"), "--precision sets them"),
    **dict.fromkeys(("defer_embedding_wgrad_compute", "kv_channels"), "this GPT has no such part"),
    "barrier_with_L1_time": "these timers take no barrier",
    "pipeline_model_parallel_size": "the program has its own, with another default",
}

# Fields of TransformerConfig that may name a file.
_FILES = ("pipeline_schedule", "pipeline_measured")

_ANY_NUMBER_OF_CHUNKS = 2  # what schedules for any number of chunks get where none is given

# Where this program's default differs from the config's.
_CONFIG_DEFAULTS = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


_PAIR_FUNCTIONS = {"in_turn": in_turn, "on_two_streams": on_two_streams}


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class RunArguments:
    """The program's own settings. Each is a flag of the same name.

    Raises:
        ArgumentError: a value is impossible; the sentence says what would be right.
    """

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "files and folders of text (default: the source of Python's standard library)",
            "section": "text",
        },
    )
    max_data_bytes: int = _setting(16 * 2**20, "read no more text than this")
    validation_fraction: float = _setting(0.05, "share of the text, at its end, that is kept for validation")

    seq_length: int = _setting(128, "tokens (bytes) in a sample", section="batch")
    micro_batch_size: int = _setting(4, "samples in a microbatch")
    num_microbatches: int = _setting(8, "microbatches of each replica in a step")
    pipeline_model_parallel_size: int | None = _setting(
        None, "P, ranks that share the layers as a pipeline (default: all that --data-parallel-size leaves)"
    )

    overlap_pairs: str | None = _setting(
        None, "run a forward and a full backward that stand side by side as one", choices=tuple(_PAIR_FUNCTIONS)
    )

    train_steps: int = _setting(400, "optimizer steps", section="optimization")
    learning_rate: float = _setting(3e-3, "peak learning rate of AdamW")
    min_learning_rate: float = _setting(3e-4, "learning rate at the last step")
    warmup_steps: int = _setting(20, "steps in which the learning rate rises to its peak")
    weight_decay: float = _setting(0.1, "decay of matrices")
    adam_beta1: float = _setting(0.9, "AdamW's first beta")
    adam_beta2: float = _setting(0.95, "AdamW's second beta")
    adam_eps: float = _setting(1e-8, "AdamW's epsilon")
    clip_grad: float = _setting(1.0, "largest norm of the whole gradient; 0: no clipping")
    precision: str = _setting("fp32", "bf16: compute and send in bf16, with fp32 weights", choices=("fp32", "bf16"))
    untie_embeddings_and_output_weights: bool = _setting(False, "give the output projection weights of its own")
    transformer_impl: str = _setting(
        "local", "what the layers are built from", choices=("local", "transformer_engine"), section="libraries"
    )
    fp8: str | None = _setting(
        None, "compute layers in FP8, in this format; needs Transformer Engine", choices=("e4m3", "hybrid")
    )
    fp8_recipe: str = _setting("delayed", "how FP8 is scaled", choices=("delayed", "tensorwise", "blockwise", "mxfp8"))
    norm_impl: str = _setting(
        "auto",
        "whose layer norms; auto: fused ones where they can be imported on a GPU",
        choices=("auto", "torch", "apex", "transformer_engine"),
    )
    optimizer_impl: str = _setting(
        "auto", "whose AdamW; auto: apex's where it can be imported on a GPU", choices=("auto", "torch", "apex")
    )
    seed: int = _setting(1234, "seed of weights, sample order and dropout", section="run")

    eval_interval: int = _setting(100, "steps between validations; 0: only before and after")
    eval_steps: int = _setting(4, "global batches in a validation")
    log_interval: int = _setting(20, "steps between two lines where there is no terminal for a bar")
    save_interval: int = _setting(100, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _setting(2, "newest checkpoints that are kept")
    run_dir: str | None = _setting(None, "the run's folder, new (default: runs/<date and time>)")
    resume: str | None = _setting(
        None, "continue the run in this folder, from its newest checkpoint or from the one whose folder is given"
    )
    trace: str | None = _setting(
        None, "record the pipeline's timeline in these training steps, as in 3,10-12, and draw it beside the metrics"
    )
    device: str = _setting("auto", "auto: GPUs when every process has one", choices=("auto", "cpu", "cuda"))

    def __post_init__(self) -> None:
        for name in (
            "seq_length",
            "micro_batch_size",
            "num_microbatches",
            "eval_steps",
            "log_interval",
            "keep_checkpoints",
        ):
            self._at_least(name, 1)
        for name in (
            "train_steps",
            "warmup_steps",
            "eval_interval",
            "save_interval",
            "clip_grad",
            "weight_decay",
            "seed",
        ):
            self._at_least(name, 0)
        if not 0.0 < self.learning_rate < float("inf"):
            raise ArgumentError(f"--learning-rate is {self.learning_rate}; it must be a positive number such as 3e-3")
        if not 0.0 <= self.min_learning_rate <= self.learning_rate:
            raise ArgumentError(
                f"--min-learning-rate is {self.min_learning_rate}; it must lie between 0 and --learning-rate "
                f"{self.learning_rate}"
            )

        if self.trace is not None:
            check_trace_steps(self.trace)

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        # Written so that not-a-number fails too.
        if not value >= least:
            raise ArgumentError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (--help lists all flags)")


def make_parser() -> argparse.ArgumentParser:
    """The parser; flags that are not given leave no attribute."""
    parser = _Parser(
        prog="train.py",
        description="Trains a byte-level GPT through a pipeline. Run it under torchrun, or alone for one process.",
        # Abbreviations break scripts when a field is added.
        allow_abbrev=False,
    )
    add_flags(parser, RunArguments)
    add_flags(parser, TransformerConfig, left_out=_NOT_FLAGS)
    return parser


@dataclass(frozen=True)
class Arguments:
    """A parsed command line: the program's own settings, and what it says about the config."""

    run: RunArguments
    config: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write them to ``folder`` for a later ``--resume``."""
        # The run may be continued from another directory.
        run = {**asdict(self.run), "data": [str(Path(path).absolute()) for path in self.run.data]}
        files = {name: str(Path(self.config[name]).absolute()) for name in _FILES if self._is_file(name)}
        content = {"run": run, "config": {**self.config, **files}}
        write_atomically(folder / ARGUMENTS, json.dumps(content, indent=1) + "\n")

    def _is_file(self, name: str) -> bool:
        value = self.config.get(name)
        return isinstance(value, str) and (name != "pipeline_schedule" or names_a_file(value))


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Read the command line. With ``--resume``, what it does not say is as the run was started.

    Raises:
        ArgumentError: an unknown flag or an impossible value.
        CheckpointError: ``--resume`` names no run.
    """
    namespace = make_parser().parse_args(argv)
    run, config = values_of(namespace, RunArguments), values_of(namespace, TransformerConfig)
    # Both dataclasses know it; the program's own is the one that counts.
    config.pop("pipeline_model_parallel_size", None)
    if {"run_dir", "resume"} <= run.keys():
        raise ArgumentError("--run-dir and --resume are both given; a resumed run stays in its own folder: give one")
    saved = _saved_arguments(find_run(Path(run["resume"]))) if "resume" in run else {"run": {}, "config": {}}
    for name in ("run_dir", "resume"):
        saved["run"].pop(name, None)
    try:
        program = RunArguments(**{**saved["run"], **run})
    except (TypeError, OverflowError) as error:  # the command line's values are of the right kind
        raise CheckpointError(f"the run to resume has an {ARGUMENTS} with a value of a wrong kind: {error}") from error
    return Arguments(program, {**_CONFIG_DEFAULTS, **saved["config"], **config})


def find_run(path: Path) -> Path:
    """The run's folder, given it or something in it. Raises NoCheckpointError if there is none."""
    # os.path: a link to itself, or a name that no file can have, is no run.
    for folder in (path, *Path(os.path.realpath(path)).parents[:2]):
        if os.path.isfile(folder / ARGUMENTS):
            return folder
    raise NoCheckpointError(
        f"there is no run at {path}; give a folder that --run-dir or runs/ holds, with {ARGUMENTS} in it"
    )


def make_config(arguments: Arguments, world_size: int) -> TransformerConfig:
    """The config of this run on ``world_size`` processes.

    Raises:
        WorldSizeError: ``world_size`` does not fit the grid.
        ConfigError: or another subclass of it; see there.
        PlanError: a schedule file does not fit the sizes, or its plan is refused.
    """
    settings = dict(arguments.config)
    pipeline_size, replicas = grid_sizes(
        world_size, arguments.run.pipeline_model_parallel_size, settings.pop("data_parallel_size", None)
    )
    if settings.get("virtual_pipeline_model_parallel_size") is None:
        settings["virtual_pipeline_model_parallel_size"] = _implied_chunks(settings.get("pipeline_schedule"))
    compute_dtype = torch.bfloat16 if arguments.run.precision == "bf16" else torch.float32
    config = TransformerConfig(
        pipeline_model_parallel_size=pipeline_size,
        data_parallel_size=replicas,
        pipeline_dtype=compute_dtype,
        enable_autocast=compute_dtype != torch.float32,
        autocast_dtype=compute_dtype,
        overlapped_forward_backward=_PAIR_FUNCTIONS.get(arguments.run.overlap_pairs or ""),
        **settings,
    )
    check_model_config(config)
    if names_a_file(config.schedule_name):
        _check_plan(config, arguments.run.num_microbatches)
    return config


def _implied_chunks(schedule: str | None) -> int | None:
    """V of a schedule for which none was given; None (one chunk) also for a name that the config will refuse."""
    if schedule is None:
        return None
    try:
        chunks = find_family(schedule).chunks or _ANY_NUMBER_OF_CHUNKS
    except PlanError:
        return None
    return chunks if chunks > 1 else None


def _check_plan(config: TransformerConfig, num_microbatches: int) -> None:
    """A user's own schedule may be anything: verified here, before any communication. Raises PlanError."""
    family = find_family(config.schedule_name)
    build_plan(
        PlanSpec(
            family.name,
            config.pipeline_model_parallel_size,
            config.num_chunks,
            num_microbatches,
            policy=config.lowering_policy,
            channels=config.p2p_channels,
            variable_shapes=config.variable_seq_lengths,
            digest=family.digest,
        )
    )


def _saved_arguments(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        saved = json.loads(read_text(folder / ARGUMENTS))
        known = {"run": RunArguments, "config": TransformerConfig}
        return {
            part: {f.name: saved[part][f.name] for f in fields(cls) if f.name in saved[part]}
            for part, cls in known.items()
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / ARGUMENTS} cannot be read ({error!r}); give all flags and a new --run-dir"
        ) from error

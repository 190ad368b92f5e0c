"""All settings of a run. A field is a flag of the same name, the comment beside it is its line in ``--help``."""

from __future__ import annotations

import dataclasses
import typing
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import tyro

from examples.gpt.errors import ArgumentError
from examples.gpt.gpt import check_model_config
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.config.parallel_grid import fit_grid
from megatron_pp.errors import PlanError, ScheduleInputError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.schedule_file import find_family, names_a_file
from megatron_pp.plan.spec import PlanSpec
from megatron_pp.runtime.pairs import in_turn, on_two_streams
from megatron_pp.tracing.recorder import chosen_steps

# Where this program's default is not the config's.
_DEFAULTS = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4}
_DEFAULTS |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Fields of TransformerConfig that this program sets itself, or that this GPT has no use for.
_NOT_FLAGS = {
    *("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "sequence_parallel"),
    *("params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype", "deterministic_mode", "kv_channels"),
    *("defer_embedding_wgrad_compute", "wgrad_deferral_limit", "barrier_with_L1_time"),
}
_PAIR_FUNCTIONS = {None: None, "in_turn": in_turn, "on_two_streams": on_two_streams}
_CHUNKS = 2  # of schedules that take any number, where none is given


def _flag(option: dataclasses.Field[Any], hint: Any) -> tuple[str, Any, Any]:
    """The field for one option of TransformerConfig."""
    if str in typing.get_args(hint):  # whatever else it may be, on a command line it is text
        hint = str | None
    if option.metadata["choices"]:
        literal = Literal[option.metadata["choices"]]
        hint = literal if hint is str else literal | None
    default = option.default_factory  # read from the environment
    if default is dataclasses.MISSING:
        copied = field(default=_DEFAULTS.get(option.name, option.default))
    else:
        copied = field(default_factory=default)
    return option.name, Annotated[hint, tyro.conf.arg(help=option.metadata["help"])], copied


_HINTS = typing.get_type_hints(TransformerConfig)
ModelOptions: Any = dataclasses.make_dataclass(
    "ModelOptions",
    [
        _flag(option, _HINTS[option.name])
        for option in dataclasses.fields(TransformerConfig)
        if option.metadata["cli"] and option.name not in _NOT_FLAGS
    ],
)
"""Every option of the model and of the pipeline engine, as ``TransformerConfig`` defines it."""


@dataclass
class Settings:
    """Trains a byte-level GPT through a pipeline. Run it under torchrun, or alone for one process."""

    config: str | None = None  # TOML file of settings, as in num_layers = 8; flags override it
    run_dir: str | None = None  # the run's folder, new; None: runs/<date and time>
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
    tensorboard: bool = True  # write TensorBoard's files beside metrics.jsonl
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
        try:
            chosen_steps("1" if self.trace is None else self.trace)
        except ScheduleInputError:
            raise ArgumentError(f"--trace is {self.trace!r}; it must list steps, as in 3,10-12") from None

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
            overlapped_forward_backward=_PAIR_FUNCTIONS[self.overlap_pairs],
            **options,
        )
        check_model_config(config)
        if names_a_file(config.schedule_name):  # which may hold anything: verified before any communication
            family, sizes = find_family(config.schedule_name), (grid.pipeline_parallel, config.num_chunks)
            lowering = {"policy": config.lowering_policy, "channels": config.p2p_channels}
            lowering |= {"variable_shapes": config.variable_seq_lengths, "digest": family.digest}
            build_plan(PlanSpec(family.name, *sizes, self.num_microbatches, **lowering))
        return config

"""The configuration the schedules read: Megatron's field names, and ours.

The engine takes any object with these field names, Megatron-core's own dataclasses among them; where such an object
lacks a field, the default here holds (`config.settings`).
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_pp.common.names import did_you_mean
from megatron_pp.config import kinds, rules
from megatron_pp.config.checks import why_removed
from megatron_pp.config.dtypes import dtype_named
from megatron_pp.config.kinds import Kind, variable_of
from megatron_pp.config.microbatch_counts import MicrobatchCount, explain_microbatch_count
from megatron_pp.errors import ConfigError
from megatron_pp.feature_table import CACHES, FSDP_COLLECTIVES
from megatron_pp.plan.ir.feature import hooks_asked_by
from megatron_pp.plan.ir.placement import PLACEMENTS
from megatron_pp.plan.ir.spec import CHANNELS
from megatron_pp.plan.orders.family import Family

if TYPE_CHECKING:
    from torch import dtype as Dtype

else:  # the command line reads these fields without torch
    Dtype = Any

# -- how a field is written: its default, one line of help, and what kind of value it takes ---------------------------


def setting(
    default: Any, help_text: str, kind: Kind | None = None, *, cli: bool = True, section: str | None = None
) -> Any:
    """A dataclass field. Metadata: help, kind, whether it makes a command-line flag, and, on the first field of a
    section, the section's name."""
    kind = kinds.FLAG if kind is None and isinstance(default, bool) else kind
    metadata = {"help": help_text, "kind": kind, "cli": cli, "section": section}
    if isinstance(default, partial):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def hook(help_text: str, kind: Kind, section: str | None = None) -> Any:
    """A field for callables, so never a flag."""
    return setting(None, help_text, kind, cli=False, section=section)


def setting_from_env(name: str, unset: Any, help_text: str, kind: Kind) -> Any:
    """A dataclass field whose default is in its environment variable when the object is made, or ``unset``."""
    return setting(partial(_read_variable, name, unset, kind), f"{help_text} [env {variable_of(name)}]", kind)


def _read_variable(name: str, unset: Any, kind: Kind) -> Any:
    variable = variable_of(name)
    text = os.environ.get(variable)
    return kind.value_of(name, text, f"environment variable {variable}") if text else unset


# -- the configuration ------------------------------------------------------------------------------------------------

Config = TypeVar("Config", bound="ModelParallelConfig")
Hook = Callable[..., Any] | None
Hooks = Callable[..., Any] | list[Any] | None


@dataclass
class ModelParallelConfig:
    """What the schedules and the communication between stages read.

    Fields left None are filled in as Megatron does: `microbatch_group_size_per_vp_stage` (P), `batch_p2p_comm` (not
    `overlap_p2p_comm`), `autocast_dtype` (`params_dtype`). `replace` makes a changed copy in which they are worked out
    anew.

    Raises ConfigError or a subclass, with the value and the nearest legal one."""

    tensor_model_parallel_size: int = setting(1, "ranks that split each layer", kinds.SIZE, section="parallel sizes")
    pipeline_model_parallel_size: int = setting(1, "P, ranks that share the layers as a pipeline", kinds.SIZE)
    virtual_pipeline_model_parallel_size: int | None = setting(
        None,
        "V, model chunks per pipeline rank",
        kinds.count(hint="None for a pipeline without chunks", install=False),
    )
    context_parallel_size: int = setting(1, "ranks that split the sequence", kinds.SIZE)
    data_parallel_size: int | None = setting(
        None, "replicas of the pipeline; None: what the world size leaves", kinds.SIZE
    )
    sequence_parallel: bool = setting(False, "split activations along the sequence over the tensor parallel ranks")

    params_dtype: Dtype = setting(partial(dtype_named, "float32"), "dtype of the parameters", section="training")
    enable_autocast: bool = setting(False, "run the forward step inside torch.autocast")
    autocast_dtype: Dtype | None = setting(None, "dtype of autocast; None: params_dtype", kinds.AUTOCAST)
    calculate_per_token_loss: bool = setting(False, "loss functions return token counts, which divide the gradients")
    num_microbatches_with_partial_activation_checkpoints: int | None = setting(
        None,
        "microbatches in flight that recompute only some layers; None: forward_step_func decides",
        kinds.count(0, install=False),
    )

    timers: Hook = hook("Megatron's timers", kinds.HOOK, section="hooks")
    grad_scale_func: Hook = hook("turns a loss into the scaled loss", kinds.HOOK)
    no_sync_func: Hooks = hook("context manager(s), one per chunk, in which gradients are not reduced", kinds.HOOKS)
    grad_sync_func: Hooks = hook(
        "function(s), one per chunk, that start to reduce gradients of given parameters", kinds.HOOKS
    )
    param_sync_func: Hooks = hook("function(s), one per chunk, that start to gather given parameters", kinds.HOOKS)
    finalize_model_grads_func: Hook = hook("called once a step, after the last backward", kinds.HOOK)
    overlapped_forward_backward: Hook = hook(
        "runs a forward and a backward of another microbatch as a pair (not in Megatron; see "
        "megatron_pp.features.pairs)",
        kinds.function_of("pairs", "PAIR_FUNCTIONS"),
    )
    barrier_with_L1_time: bool = setting(True, "level-1 timers start after a barrier")  # noqa: N815 (Megatron's name)

    pipeline_dtype: Dtype | None = setting(
        None, "dtype of the tensors between stages; required if P > 1", kinds.DTYPE, section="pipeline"
    )
    microbatch_group_size_per_vp_stage: int | None = setting(
        None, "G, microbatches a chunk runs before the next chunk takes over; None: P", kinds.count(checked=kinds.NEVER)
    )
    variable_seq_lengths: bool = setting(
        False, "microbatches differ in shape; the shape is sent before each tensor", kinds.SWITCH
    )
    overlap_p2p_comm: bool = setting(False, "send and receive while computing, in warm-up and flush too", kinds.SWITCH)
    batch_p2p_comm: bool | None = setting(
        None, "group sends and receives into one call; None: unless overlap_p2p_comm", kinds.SWITCH
    )
    batch_p2p_sync: bool = setting(
        False, "wait for the device after each grouped call, as old releases of PyTorch needed", kinds.SWITCH
    )
    deallocate_pipeline_outputs: bool = setting(
        True, "free the data of an output after its send, unless its graph needs the data", kinds.SWITCH
    )
    defer_embedding_wgrad_compute: bool = setting(
        False, "call the last stage's finish_embedding_wgrad_compute() before gradients are finalised"
    )

    pipeline_schedule: str | None = setting(
        None,
        "name of a schedule, or a .csv or .json file; None: 1f1b, or interleaved_1f1b if V > 1; with sequence_slices: "
        "seq_1f1b, or interleaved_seq_1f1b",
        kinds.SCHEDULE,
        section="pipeline, not in Megatron",
    )
    sequence_slices: int = setting(
        1,
        "slices into which every sequence is cut; each goes through the pipeline by itself; 1: whole sequences",
        kinds.SIZE,
    )
    balance_sequence_slices: bool = setting(
        False, "cut sequences into slices of equal cost under causal attention, not of equal length"
    )
    offload_chunks: int | None = setting(
        None,
        "the first so many model chunks of every rank keep their activations in host memory between forward and "
        "backward; None: half of the chunks under pipe_offload, otherwise none",
        kinds.count(0, "None for the schedule's own"),
    )
    offload_slots: int = setting(
        1, "compute operations during which the plan lets a copy to host memory, or back, run", kinds.count()
    )
    fsdp_collectives: str | None = setting(
        None,
        "when the plan gathers parameters and reduces gradients of stages that fully_shard (FSDP2) shards: "
        "per_step, per_run, zero2, zero3 (presets) or by_cost; None: FSDP2's own hooks do it",
        kinds.choice(FSDP_COLLECTIVES, checked=kinds.EVERY_STEP),
    )
    fsdp_max_active_stages: int | None = setting(
        None,
        "with fsdp_collectives: how many stages of a rank may have whole parameters at a time; None: all",
        kinds.count(hint="None for all"),
    )
    skip_tensors: Any = setting(
        None,
        "named tensors that stages send to later stages, as in 'skip=0>3; mask=0>1,2 no_grad'; blocks: one tensor of "
        "every stage, to all later stages",
        cli=False,
    )
    skip_cache: str = setting(
        "received",
        "which skip tensors a rank keeps, so that they are not sent to it again: none, received, or all (its own too)",
        kinds.choice(CACHES, checked=kinds.EVERY_STEP, install=False),
        cli=False,
    )
    pipeline_measured: Any = setting(
        None,
        "times and memory that auto and auto_v plan for: a Measured, a dict, or a JSON file; None: equal times",
        kinds.MEASURED,
    )
    pipeline_placement: str | None = setting(
        None,
        "which rank holds which stage: loop or v; None: as the schedule says",
        kinds.choice(PLACEMENTS, checked=kinds.MADE, install=False),
    )
    p2p_channels: str = setting(
        "one_way",
        "one_way: a channel for each direction and kind of message; shared: only the given process group",
        kinds.choice(CHANNELS, checked=kinds.EVERY_STEP),
    )
    p2p_max_ctas: int | None = setting(
        None,
        "thread blocks of the GPU that one transfer may occupy on NCCL, also while it waits for its peer; None: the "
        "number of the pipeline group, or 8 if that has none",
        kinds.count(hint="None for the pipeline group's own"),
    )
    max_pending_sends: int = setting(
        2, "unfinished sends that a rank may have before it waits for one of them", kinds.count(0)
    )
    p2p_timeout: float | None = setting(
        None,
        "seconds after which a transfer without an answer is an error; None: 480, or 0.8 of the process group's "
        "timeout if that is shorter",
        kinds.SECONDS,
    )
    compute_timeout: float | None = setting(
        None,
        "seconds that one operation of a rank may take while the rank sends heartbeats; None: ten times p2p_timeout, "
        "or 0.95 of the process group's timeout if that is shorter",
        kinds.SECONDS,
    )
    step_number: int | Callable[[], int] | None = setting(
        None,
        "the program's number of this step, or a function that returns it; ranks in different steps are an error",
        kinds.STEP_NUMBER,
        cli=False,
    )
    warm_up_p2p: bool = setting(
        True, "connect neighbours before the first step, not within it; NCCL's channels always are", kinds.SWITCH
    )
    device_sync: bool | None = setting(
        None,
        "True: compute synchronises the device, so no receive is posted ahead; False: receives are posted ahead, also "
        "if a wait for the device can then hang; None: True with timers at log level 2, otherwise receives are posted "
        "ahead if no wait for the device can hang",
        kinds.SWITCH,
    )
    p2p_debug: bool = setting_from_env(
        "p2p_debug", False, "check shapes, dtypes and order of every transfer (slow)", kinds.SWITCH
    )
    trace_dir: str | None = setting_from_env("trace_dir", None, "folder for traces of real steps", kinds.TEXT)
    trace_steps: str | None = setting_from_env(
        "trace_steps", None, "training steps to trace, from 1, as in 3,10-12; None: 2 to 21", kinds.STEPS
    )
    trace_first_step: int = setting(
        1, "the number of this process's first step, such as after a resume", kinds.count(), cli=False
    )
    measure: int = setting_from_env(
        "measure",
        0,
        "number of training steps, after the first one, that measure times and memory of stages; then transfers are "
        "measured; 0: none",
        kinds.count(0),
    )
    measure_out: str | None = setting_from_env(
        "measure_out",
        None,
        "file for these measurements, which pipeline_measured and advise read; None: megatron_pp_measured.json in "
        "trace_dir, or in the working folder if there is none",
        kinds.TEXT,
    )
    microbatch_costs: Sequence[float] | Callable[[], Sequence[float]] | None = setting(
        None,
        "cost of each microbatch of the step, in any unit, or a function that returns the costs; steps of unequal "
        "microbatches get plans of their own; None: all cost the same",
        kinds.MICROBATCH_COSTS,
        cli=False,
    )

    def __post_init__(self) -> None:
        check_values(self, _checked(type(self), kinds.MADE))
        from megatron_pp.config import made

        made.check_made(self)
        self._filled_in = self._fill_in(
            microbatch_group_size_per_vp_stage=self.pipeline_model_parallel_size,
            batch_p2p_comm=not self.overlap_p2p_comm,
            autocast_dtype=self.params_dtype,
        )

    def _fill_in(self, **derived: Any) -> frozenset[str]:
        """Set the fields left None that Megatron derives; returns their names."""
        missing = [name for name in derived if getattr(self, name) is None]
        for name in missing:
            setattr(self, name, derived[name])
        return frozenset(missing)

    @property
    def lowering_policy(self) -> str:
        """'overlap', 'batched' or 'plain': how the plan's sends and receives go out."""
        return rules.lowering_policy(self)

    @property
    def num_chunks(self) -> int:
        """V; 1 without virtual pipelining."""
        return 1 if self.virtual_pipeline_model_parallel_size is None else self.virtual_pipeline_model_parallel_size

    @property
    def schedule_name(self) -> str:
        """The schedule family in use: `pipeline_schedule`, or what V implies."""
        return rules.schedule_name(self.pipeline_schedule, self.num_chunks, hooks_asked_by(self))

    @property
    def placement_name(self) -> str:
        """Which rank holds which stage: 'loop' or 'v'."""
        return self._family.placement

    @property
    def _family(self) -> Family:
        return rules.schedule_family(self.pipeline_schedule, self.num_chunks, hooks_asked_by(self))

    def explain_microbatch_count(self, num_microbatches: int) -> MicrobatchCount:
        """The effect of this number of microbatches on speed; raises MicrobatchCountError unless it is at least 1."""
        sizes: tuple[Any, ...] = (self.pipeline_model_parallel_size,)
        if self._family.idles_in_short_groups:
            sizes = (*sizes, self.num_chunks, self.microbatch_group_size_per_vp_stage)
        return explain_microbatch_count(num_microbatches, *sizes)

    def __new__(cls, *values: Any, **options: Any) -> Any:
        """Raises TypeError for an option that is none, with the nearest one, ConfigError for one that there was."""
        known = inspect.signature(cls.__init__).parameters
        unknown = [name for name in options if name not in known]
        if unknown and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            if why := why_removed(unknown[0]):
                raise ConfigError(why)
            raise TypeError(f"{cls.__name__} has no option {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        return super().__new__(cls)

    def replace(self: Config, **changes: Any) -> Config:
        """A changed copy; derived values are computed again (dataclasses.replace keeps them). Raises as the class."""
        fresh: dict[str, Any] = {name: None for name in self._filled_in if name not in changes}
        return dataclasses.replace(self, **fresh, **changes)


Rows = tuple[tuple[str, Callable[[str, Any], Any], Any], ...]


def _checked(config: type, when: int) -> Rows:
    """(name, check, default) of the fields that are checked ``when``; of one from the environment, None."""
    rows = ((field.name, field.metadata.get("kind"), field.default) for field in dataclasses.fields(config))
    return tuple(
        (name, kind.check or kind.accept, None if default is dataclasses.MISSING else default)
        for name, kind, default in rows
        if kind and kind.checked >= when
    )


_OF_STEPS = _checked(ModelParallelConfig, kinds.EVERY_STEP)


def check_values(config: Any, rows: Rows = _OF_STEPS) -> None:
    """Of a config, or of a step's settings. Raises ConfigError."""
    for name, accept, default in rows:
        value = getattr(config, name, default)
        if value is not default:
            accept(name, value)
    rules.check_timeouts(config)
    rules.lowering_policy(config)


@dataclass
class TransformerConfig(ModelParallelConfig):
    """Adds the sizes of a transformer and where its layers go. Raises LayoutError where a layer would be left over."""

    num_layers: int = setting(0, "transformer layers of the whole model", kinds.SIZE, section="model")
    hidden_size: int = setting(0, "width of the residual stream", kinds.SIZE)
    num_attention_heads: int = setting(0, "attention heads per layer", kinds.SIZE)
    ffn_hidden_size: int | None = setting(None, "width inside the feed-forward part; None: 4 * hidden_size", kinds.SIZE)
    kv_channels: int | None = setting(None, "width of one head; None: hidden_size / num_attention_heads", kinds.SIZE)
    hidden_dropout: float = setting(0.1, "dropout probability on the residual stream", kinds.PROBABILITY)
    attention_dropout: float = setting(0.1, "dropout probability on attention weights", kinds.PROBABILITY)
    layernorm_epsilon: float = setting(1e-5, "added to the variance in norms")
    init_method_std: float = setting(0.02, "standard deviation of initial weights")

    num_layers_in_first_pipeline_stage: int | None = setting(
        None, "layers of the first pipeline rank, all its chunks together", section="layer placement"
    )
    num_layers_in_last_pipeline_stage: int | None = setting(
        None, "layers of the last pipeline rank, all its chunks together"
    )
    account_for_embedding_in_pipeline_split: bool = setting(False, "count the embedding as a layer of the first stage")
    account_for_loss_in_pipeline_split: bool = setting(False, "count the loss as a layer of the last stage")
    pipeline_model_parallel_layout: Any = setting(
        None, "layers per stage in model order: 8,8,7,7 or Megatron's 'Et*8|t*8|t*7|t*7L'"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        from megatron_pp.config import made

        made.check_model_sizes(self)
        kv_channels = self.hidden_size // self.num_attention_heads
        self._filled_in |= self._fill_in(ffn_hidden_size=4 * self.hidden_size, kv_channels=kv_channels)
        self.layers_of_stages()

    def layers_of_stages(self) -> list[list[int]]:
        """Layer numbers (from 0) of each of the P * V stages in model order; `plan.placement` maps stages to ranks.
        Raises LayoutError."""
        from megatron_pp.config import layout

        return layout.place_layers(
            self.num_layers,
            self.pipeline_model_parallel_size,
            self.num_chunks,
            layout=self.pipeline_model_parallel_layout,
            num_layers_in_first_pipeline_stage=self.num_layers_in_first_pipeline_stage,
            num_layers_in_last_pipeline_stage=self.num_layers_in_last_pipeline_stage,
            account_for_embedding=self.account_for_embedding_in_pipeline_split,
            account_for_loss=self.account_for_loss_in_pipeline_split,
            placement=self.placement_name,
        )

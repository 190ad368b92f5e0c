"""The configuration that the schedules read: Megatron's field names, and ours.

The engine takes any object with these field names, also Megatron-core's dataclasses. If the object lacks a field, the
default here holds (`config.settings`).
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_pp.common.names import did_you_mean
from megatron_pp.config import kinds, rules
from megatron_pp.config.checks import one_of
from megatron_pp.config.dtypes import dtype_named
from megatron_pp.config.kinds import Kind
from megatron_pp.config.setting_names import variable_of
from megatron_pp.config.step_fields import DEFAULTS, Hook, Hooks
from megatron_pp.feature_table import CACHES, FSDP_COLLECTIVES
from megatron_pp.plan.ir.feature import hooks_asked_by
from megatron_pp.plan.ir.placement import PLACEMENTS
from megatron_pp.plan.ir.spec import CHANNELS
from megatron_pp.plan.orders.family import Family

if TYPE_CHECKING:
    from torch import dtype as Dtype

    from megatron_pp.config.microbatch_counts import MicrobatchCount

else:  # the command line reads these fields without torch
    Dtype = Any

# -- how a field is written: its default, one line of help, and the kind of its value ---------------------------------

_AS_IN_STEPS = object()


def setting(
    default: Any, help_text: str, kind: Kind | None = None, *, cli: bool = True, section: str | None = None
) -> Any:
    """A dataclass field. Its metadata has the help, the kind, whether it makes a command-line flag, and on the first
    field of a section the section's name."""
    kind = kinds.FLAG if kind is None and isinstance(default, bool) else kind
    metadata = {"help": help_text, "kind": kind, "cli": cli, "section": section}
    if isinstance(default, partial):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def read_by_steps(help_text: str, kind: Kind | None = None, *, cli: bool = True, section: str | None = None) -> Any:
    """A dataclass field that steps read. `step_fields.py` has its default and the check of its value."""
    return setting(_AS_IN_STEPS, help_text, kind, cli=cli, section=section)


def hook(help_text: str, section: str | None = None) -> Any:
    """A dataclass field that steps read and that holds callables. It makes no flag."""
    return read_by_steps(help_text, kinds.HOOK, cli=False, section=section)


def setting_from_env(name: str, help_text: str) -> Any:
    """A dataclass field whose default is read from its environment variable when a config is made, if that is set."""
    return setting(partial(_from_env, name), f"{help_text} [env {variable_of(name)}]", kinds.IN_ENVIRONMENT[name])


def _from_env(name: str) -> Any:
    given = kinds.read_variable(name)
    return DEFAULTS[name] if given is None else given


Class = TypeVar("Class", bound=type[Any])


def with_defaults(config: Class) -> Class:
    """``config``, after its fields made by `read_by_steps` got the defaults of `step_fields.py`."""
    for name, field in vars(config).items():
        if isinstance(field, dataclasses.Field) and field.default is _AS_IN_STEPS:
            field.default = DEFAULTS[name]
    return config


# -- the configuration ------------------------------------------------------------------------------------------------

Config = TypeVar("Config", bound="ModelParallelConfig")


@dataclass
@with_defaults
class ModelParallelConfig:
    """The settings that the schedules and the communication between stages read.

    Three fields that are None are filled in as Megatron does: `microbatch_group_size_per_vp_stage` (P),
    `batch_p2p_comm` (not `overlap_p2p_comm`), `autocast_dtype` (`params_dtype`). `replace` makes a changed copy and
    fills these fields in again.

    Raises ConfigError or a subclass, with the value and the nearest legal one."""

    tensor_model_parallel_size: int = read_by_steps("ranks that split each layer", kinds.SIZE, section="parallel sizes")
    pipeline_model_parallel_size: int = setting(1, "P, ranks that share the layers as a pipeline", kinds.SIZE)
    virtual_pipeline_model_parallel_size: int | None = read_by_steps(
        "V, model chunks per pipeline rank",
        kinds.COUNT._replace(install=False),
    )
    context_parallel_size: int = read_by_steps("ranks that split the sequence", kinds.SIZE)
    data_parallel_size: int | None = setting(
        None, "replicas of the pipeline; None: the world size divided by the other sizes", kinds.SIZE
    )
    sequence_parallel: bool = read_by_steps(
        "split activations along the sequence over the tensor parallel ranks", kinds.FLAG
    )

    params_dtype: Dtype = setting(partial(dtype_named, "float32"), "dtype of the parameters", section="training")
    enable_autocast: bool = read_by_steps("run the forward step inside torch.autocast", kinds.FLAG)
    autocast_dtype: Dtype | None = read_by_steps("dtype of autocast; None: params_dtype", kinds.AUTOCAST)
    calculate_per_token_loss: bool = read_by_steps(
        "loss functions return token counts, which divide the gradients", kinds.FLAG
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = read_by_steps(
        "microbatches in flight that recompute only some layers; None: forward_step_func decides",
        kinds.COUNT._replace(install=False),
    )

    timers: Hook = hook("Megatron's timers", section="hooks")
    grad_scale_func: Hook = hook("turns a loss into the scaled loss")
    no_sync_func: Hooks = hook("context manager(s), one per chunk, in which gradients are not reduced")
    grad_sync_func: Hooks = hook("function(s), one per chunk, that start to reduce gradients of given parameters")
    param_sync_func: Hooks = hook("function(s), one per chunk, that start to gather given parameters")
    finalize_model_grads_func: Hook = hook("called once a step, after the last backward")
    overlapped_forward_backward: Hook = read_by_steps(
        "runs a forward and a backward of another microbatch as a pair (not in Megatron; see "
        "megatron_pp.features.pairs)",
        kinds.function_of("pairs.pair_runner", "PAIR_FUNCTIONS"),
        cli=False,
    )
    barrier_with_L1_time: bool = read_by_steps("level-1 timers start after a barrier", kinds.FLAG)  # noqa: N815 (Megatron's name)

    pipeline_dtype: Dtype | None = read_by_steps(
        "dtype of the tensors between stages; required if P > 1", kinds.DTYPE, section="pipeline"
    )
    microbatch_group_size_per_vp_stage: int | None = read_by_steps(
        "G, microbatches that a chunk runs before the rank switches to its next chunk; None: P", kinds.GROUP_SIZE
    )
    variable_seq_lengths: bool = read_by_steps(
        "microbatches differ in shape; the shape is sent before each tensor", kinds.SWITCH
    )
    overlap_p2p_comm: bool = read_by_steps(
        "overlap sends and receives with compute, also in warm-up and flush", kinds.SWITCH
    )
    batch_p2p_comm: bool | None = read_by_steps(
        "group sends and receives into one call; None: the opposite of overlap_p2p_comm", kinds.SWITCH
    )
    batch_p2p_sync: bool = read_by_steps(
        "wait for the device after each grouped call, as old releases of PyTorch needed", kinds.SWITCH
    )
    deallocate_pipeline_outputs: bool = read_by_steps(
        "free the data of an output after its send, unless its graph needs the data", kinds.SWITCH
    )
    defer_embedding_wgrad_compute: bool = read_by_steps(
        "call the last stage's finish_embedding_wgrad_compute() before gradients are finalised", kinds.FLAG
    )

    pipeline_schedule: str | None = read_by_steps(
        "name of a schedule, or a .csv or .json file; None: 1f1b, or interleaved_1f1b if V > 1; with sequence_slices: "
        "seq_1f1b, or interleaved_seq_1f1b",
        kinds.SCHEDULE,
        section="pipeline, not in Megatron",
    )
    sequence_slices: int = read_by_steps(
        "slices into which every sequence is cut; each goes through the pipeline by itself; 1: whole sequences",
        kinds.SIZE,
    )
    balance_sequence_slices: bool = read_by_steps(
        "cut sequences into slices of equal cost under causal attention, not of equal length", kinds.FLAG
    )
    offload_chunks: int | None = read_by_steps(
        "number of model chunks of each rank, from its first, whose activations are in host memory between forward "
        "and backward; None: half of the chunks under pipe_offload, otherwise 0",
        kinds.COUNT,
    )
    offload_slots: int = read_by_steps(
        "number of compute operations for which the plan lets a copy to host memory, or back, run", kinds.COUNT
    )
    fsdp_collectives: str | None = read_by_steps(
        "when the plan gathers parameters and reduces gradients of stages sharded by fully_shard (FSDP2): "
        "per_step, per_run, zero2, zero3 (presets) or by_cost; None: FSDP2's own hooks do it",
        kinds.choice(FSDP_COLLECTIVES),
    )
    fsdp_max_active_stages: int | None = read_by_steps(
        "with fsdp_collectives: how many stages of a rank may have whole parameters at a time; None: all",
        kinds.COUNT,
    )
    skip_tensors: Any = read_by_steps(
        "named tensors that stages send to later stages, as in 'skip=0>3; mask=0>1,2 no_grad'; blocks: one tensor of "
        "every stage, to all later stages",
        cli=False,
    )
    skip_cache: str = read_by_steps(
        "which skip tensors a rank keeps, so that they are not sent to it again: none, received, or all (also its own)",
        kinds.choice(CACHES, install=False),
        cli=False,
    )
    pipeline_measured: Any = read_by_steps(
        "times and memory that auto and auto_v plan for: a Measured, a dict, or a JSON file; None: equal times",
        kinds.MEASURED,
    )
    pipeline_placement: str | None = setting(
        None,
        "which rank holds which stage: loop or v; None: as the schedule says",
        kinds.choice(PLACEMENTS, partial(one_of, known=PLACEMENTS), when_made=True, install=False),
    )
    p2p_channels: str = read_by_steps(
        "one_way: a channel for each direction and kind of message; shared: only the given process group",
        kinds.choice(CHANNELS),
    )
    p2p_max_ctas: int | None = read_by_steps(
        "thread blocks of the GPU that one transfer may occupy on NCCL, also while it waits for its peer; None: the "
        "number of the pipeline group, or 8 if that has none",
        kinds.COUNT,
    )
    max_pending_sends: int = read_by_steps(
        "unfinished sends that a rank may have before it waits for one of them", kinds.COUNT
    )
    p2p_timeout: float | None = setting_from_env(
        "p2p_timeout",
        "seconds after which a transfer without an answer is an error; None: 480, or 0.8 of the process group's "
        "timeout if that is shorter",
    )
    compute_timeout: float | None = setting_from_env(
        "compute_timeout",
        "seconds that one operation of a rank may take while the rank sends heartbeats; None: ten times p2p_timeout, "
        "or 0.95 of the process group's timeout if that is shorter",
    )
    step_number: int | Callable[[], int] | None = read_by_steps(
        "the program's number of this step, or a function that returns it; ranks in different steps raise an error",
        kinds.STEP_NUMBER,
        cli=False,
    )
    warm_up_p2p: bool = read_by_steps(
        "connect neighbours before the first step, not within it; on NCCL they always connect before it", kinds.SWITCH
    )
    device_sync: bool | None = read_by_steps(
        "True: compute synchronises the device, so no receive is posted ahead; False: receives are posted ahead, also "
        "if a wait for the device can then hang; None: True with timers at log level 2, otherwise receives are posted "
        "ahead if no wait for the device can hang",
        kinds.SWITCH,
    )
    p2p_debug: bool = setting_from_env("p2p_debug", "check shapes, dtypes and order of every transfer (slow)")
    trace_dir: str | None = setting_from_env("trace_dir", "folder for traces of real steps")
    trace_steps: str | None = setting_from_env(
        "trace_steps", "training steps to trace, from 1, as in 3,10-12; None: 2 to 21"
    )
    trace_first_step: int = read_by_steps(
        "the number of this process's first step, such as after a resume", kinds.COUNT, cli=False
    )
    measure: int = setting_from_env(
        "measure",
        "number of training steps, after the first one, that measure times and memory of stages; then transfers are "
        "measured; 0: none",
    )
    measure_out: str | None = setting_from_env(
        "measure_out",
        "file for these measurements, which pipeline_measured and advise read; None: megatron_pp_measured.json in "
        "trace_dir, or in the working folder if there is none",
    )
    metrics: Any = read_by_steps(
        "a function metrics(step, numbers) of a rank's compute and waits in a step, or n: TensorBoard's scalars of "
        "every n-th step, through the writer of Megatron's training loop; 0: none",
        kinds.METRICS,
        cli=False,
    )
    microbatch_costs: Sequence[float] | Callable[[], Sequence[float]] | None = read_by_steps(
        "cost of each microbatch of the step, in any unit, or a function that returns the costs; steps of unequal "
        "microbatches get plans of their own; None: all cost the same",
        kinds.MICROBATCH_COSTS,
        cli=False,
    )

    def __post_init__(self) -> None:
        from megatron_pp.config import made

        made.check_made(self)
        self._filled_in = self._fill_in(
            microbatch_group_size_per_vp_stage=self.pipeline_model_parallel_size,
            batch_p2p_comm=not self.overlap_p2p_comm,
            autocast_dtype=self.params_dtype,
        )

    def _fill_in(self, **derived: Any) -> frozenset[str]:
        """Set those of the ``derived`` fields that are None. Returns their names."""
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

    def explain_microbatch_count(self, num_microbatches: int) -> "MicrobatchCount":
        """The effect of this number of microbatches on speed. Raises MicrobatchCountError if it is below 1."""
        from megatron_pp.config.microbatch_counts import explain_microbatch_count

        sizes: tuple[Any, ...] = (self.pipeline_model_parallel_size,)
        if self._family.idles_in_short_groups:
            sizes = (*sizes, self.num_chunks, self.microbatch_group_size_per_vp_stage)
        return explain_microbatch_count(num_microbatches, *sizes)

    def __new__(cls, *values: Any, **options: Any) -> Any:
        """Raises TypeError for an unknown option, with the nearest known one."""
        known = inspect.signature(cls.__init__).parameters
        unknown = [name for name in options if name not in known]
        if unknown and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
            raise TypeError(f"{cls.__name__} has no option {unknown[0]!r}{did_you_mean(unknown[0], known)}")
        return super().__new__(cls)

    def replace(self: Config, **changes: Any) -> Config:
        """A changed copy, in which derived values are computed again (dataclasses.replace keeps them). Raises as the
        class does."""
        fresh: dict[str, Any] = {name: None for name in self._filled_in if name not in changes}
        return dataclasses.replace(self, **fresh, **changes)


@dataclass
@with_defaults
class TransformerConfig(ModelParallelConfig):
    """Adds the sizes of a transformer, and where its layers go. Raises LayoutError if a layer would be left over."""

    num_layers: int = setting(0, "transformer layers of the whole model", kinds.SIZE, section="model")
    hidden_size: int = read_by_steps("width of the residual stream", kinds.SIZE)
    num_attention_heads: int = setting(0, "attention heads per layer", kinds.SIZE)
    ffn_hidden_size: int | None = read_by_steps("width inside the feed-forward part; None: 4 * hidden_size", kinds.SIZE)
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

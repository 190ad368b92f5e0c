"""Memory in bytes: what a transformer keeps per microbatch and layer, and what that makes of a plan on every rank.

Activations of a layer are those of arXiv 2205.05198 (section 4, in bytes for 16-bit activations:
s b h (34 + 5 a s / h), less with tensor parallelism and recomputation); what weight gradients need after a split
backward is that of arXiv 2401.10241 (appendix: 32 s b h, more than the forward of a recomputed layer kept). Parameters,
gradients and optimizer states are those of Megatron's mixed-precision optimizer; a feature may split all of them
(``PlanHooks.bytes_of_parameters``). Messages that the allocator keeps back are counted as on NCCL
(``record_stream.py``); workspace of kernels and fragmentation are not.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError
from megatron_pp.on_demand import load
from megatron_pp.plan.costs.activations import host_timeline, kept_timeline
from megatron_pp.plan.ir.feature import hooks_of
from megatron_pp.plan.ir.ledger import KINDS
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.verify.lifetime import LifetimeWalk
from megatron_pp.plan.verify.record_stream import recorded_timeline

NONE = "none"
SELECTIVE = "selective"  # attention's softmax part is computed again, or never stored (flash attention)
FULL = "full"  # each layer keeps only its input
RECOMPUTE = (NONE, SELECTIVE, FULL)


@dataclass(frozen=True)
class ModelShape:
    """What decides a transformer's memory. Sizes are of the whole model, before any parallel split.

    num_layers, hidden_size, num_attention_heads, ffn_hidden_size (None: 4 h), vocab_size (0: no embedding and head)
    seq_length, micro_batch_size
    tensor_parallel, context_parallel, data_parallel  ranks; data_parallel > 1 means a distributed optimizer
    splits_optimizer   context-parallel ranks have one even where data_parallel is 1
    sequence_parallel  whether the parts outside tensor parallelism are split too
    recompute          none, selective or full
    element_bytes      of an activation and of a parameter: 2 for bf16
    """

    num_layers: int
    hidden_size: int
    seq_length: int
    micro_batch_size: int = 1
    num_attention_heads: int = 0
    ffn_hidden_size: int | None = None
    vocab_size: int = 0
    tensor_parallel: int = 1
    context_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    recompute: str = SELECTIVE
    element_bytes: int = 2
    splits_optimizer: bool = False

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "seq_length", "micro_batch_size", "element_bytes")
        ranks = ("tensor_parallel", "context_parallel", "data_parallel")
        for name in (*sizes, "num_attention_heads", "vocab_size", *ranks):
            least = 0 if name in ("num_attention_heads", "vocab_size") else 1
            if getattr(self, name) < least:
                raise PlanError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.recompute not in RECOMPUTE:
            raise PlanError(unknown("recompute", self.recompute, RECOMPUTE))

    @property
    def tokens(self) -> float:
        """s * b of one rank."""
        return self.seq_length * self.micro_batch_size / self.context_parallel

    @property
    def message_bytes(self) -> float:
        """One activation (or its gradient) between stages: [s, b, h]."""
        split = self.tensor_parallel if self.sequence_parallel else 1
        return self.tokens * self.hidden_size * self.element_bytes / split

    @property
    def layer_bytes(self) -> float:
        """What one layer keeps of one microbatch between its forward and its backward."""
        unit = self.tokens * self.hidden_size * self.element_bytes / 2  # the paper counts 2 bytes an element
        t = self.tensor_parallel
        outside = t if self.sequence_parallel else 1
        if self.recompute == FULL:
            return 2 * unit / outside
        attention = 0.0
        if self.recompute == NONE:
            attention = 5 * self.num_attention_heads * self.seq_length / self.context_parallel / self.hidden_size
        return unit * (10 / outside + (24 * self._ffn_share + attention) / t)

    @property
    def layer_key_value_bytes(self) -> float:
        """Keys and values of one layer and microbatch, which are part of ``layer_bytes`` unless it is recomputed."""
        return 2 * self.tokens * self.hidden_size * self.element_bytes / self.tensor_parallel

    @property
    def layer_weight_grad_bytes(self) -> float:
        """What a layer holds of a microbatch between input and weight gradients: inputs and output gradients of its
        four linear maps (two of each are whole on every tensor-parallel rank).
        """
        unit = self.tokens * self.hidden_size * self.element_bytes / 2
        outside = self.tensor_parallel if self.sequence_parallel else 1
        return unit * (8 / outside + 24 * self._ffn_share / self.tensor_parallel)

    @property
    def layer_parameters(self) -> float:
        h, ffn = self.hidden_size, self.ffn_hidden_size or 4 * self.hidden_size
        return (4 * h * h + 2 * h * ffn) / self.tensor_parallel

    @property
    def bytes_per_parameter(self) -> float:
        """Parameter, fp32 gradient, and fp32 copy with two moments, which a distributed optimizer splits."""
        return self.element_bytes + 4 + 12 / self.optimizer_ranks

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that each have a part of the optimizer's states: Megatron's group of data and context parallelism."""
        splits = self.splits_optimizer or self.data_parallel > 1
        return self.data_parallel * self.context_parallel if splits else 1

    @property
    def _ffn_share(self) -> float:
        """Of the 24 s b h inside tensor parallelism, 16 are the feed-forward part's at width 4 h (2205.05198, 4.1)."""
        return (8 + 16 * (self.ffn_hidden_size or 4 * self.hidden_size) / (4 * self.hidden_size)) / 24

    def layers_per_stage(self, num_stages: int) -> int:
        """Raises PlanError where the layers do not divide."""
        layers, left = divmod(self.num_layers, num_stages)
        if left:
            raise PlanError(f"{self.num_layers} layers do not divide over {num_stages} stages; a multiple of it would")
        return layers

    def kept_bytes(self, stage: int, num_stages: int) -> float:
        """What a stage keeps of one microbatch between forward and backward, without its input (a pipeline tensor)."""
        kept = self.layers_per_stage(num_stages) * self.layer_bytes
        if stage > 0:
            kept = max(0.0, kept - self.message_bytes)
        return kept + (self.logits_bytes if stage == num_stages - 1 else 0.0)

    def kept_for_weights(self, stage: int, num_stages: int) -> float:
        """What a stage holds of a microbatch from its input gradients until its weight gradients are done."""
        kept = self.layers_per_stage(num_stages) * self.layer_weight_grad_bytes
        if self.vocab_size and stage == 0:  # the output gradient of the embedding
            kept += self.message_bytes
        if self.vocab_size and stage == num_stages - 1:  # the input of the output layer, and its output gradient
            kept += self.message_bytes + self.element_bytes * self.tokens * self.vocab_size / self.tensor_parallel
        return kept

    def weight_share(self, stage: int, num_stages: int) -> float:
        """``kept_for_weights`` over all that a forward keeps, the stage's input included."""
        whole = self.kept_bytes(stage, num_stages) + (self.message_bytes if stage > 0 else 0.0)
        return self.kept_for_weights(stage, num_stages) / whole

    @property
    def logits_bytes(self) -> float:
        """Logits of one microbatch, in fp32."""
        return 4 * self.tokens * self.vocab_size / self.tensor_parallel

    def parameters(self, stages: Sequence[int], num_stages: int, output_share: float | None = None) -> float:
        """Their number on a rank that holds ``stages``. ``output_share``: its share of a split output layer."""
        parameters = self.layers_per_stage(num_stages) * self.layer_parameters * len(stages)
        table = self.vocab_size * self.hidden_size / self.tensor_parallel
        share = (num_stages - 1 in stages) if output_share is None else output_share
        return parameters + table * ((0 in stages) + share)

    def static_bytes(self, stages: Sequence[int], num_stages: int, output_share: float | None = None) -> float:
        """Parameters, gradients and optimizer states of a rank; arguments as of ``parameters``."""
        return self.parameters(stages, num_stages, output_share) * self.bytes_per_parameter


class Parts(NamedTuple):
    """Bytes that a rank holds at one time beside its static part.

    activations  what layers keep for their backwards, and for weight gradients that wait
    outputs      of stages: until they are sent or, where they stay, until their backwards
    messages     inputs of stages, gradients between stages, and buffers of posted receives
    kept_back    freed messages that the allocator keeps back (``record_stream.py``)
    whole        parameters and gradients of sharded stages while they are whole (``features/fsdp``)
    """

    activations: float = 0.0
    outputs: float = 0.0
    messages: float = 0.0
    kept_back: float = 0.0
    whole: float = 0.0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank: ``static``, and right after ``plan.timed(rank)[i]`` ``after[i]`` on the device and
    ``on_host[i]`` in host memory. ``parts``: of the largest of ``after``.
    """

    static: float
    after: Sequence[float]
    on_host: Sequence[float]
    parts: Parts

    @property
    def peak(self) -> float:
        """Static part included."""
        return self.static + max(self.after, default=0.0)

    @property
    def host_peak(self) -> float:
        """The most that is offloaded at once."""
        return max(self.on_host, default=0.0)


def rank_memory(plan: Plan, rank: int, shape: ModelShape, deallocate: bool = True) -> RankMemory:
    """Bytes of ``rank`` along its program. ``deallocate``: whether an output goes when it was sent. Raises PlanError
    where the layers do not divide over the stages.
    """
    stages, total, slices = plan.placement.stages[rank], plan.placement.num_stages, plan.spec.num_parts
    share = 1 / plan.placement.pipeline_size if plan.placement.barriers else None
    static, logits = shape.static_bytes(stages, total, share), shape.logits_bytes * (share or 0.0)
    whole_timeline: Iterable[float] = repeat(0.0, len(plan.timed(rank)))
    for hooks in hooks_of(plan.spec.added):
        static, whole_timeline = hooks.bytes_of_parameters(plan, rank, shape) or (static, whole_timeline)
    shape = shape if share is None else replace(shape, vocab_size=0)  # the output layer is no stage's
    key_values = shape.layers_per_stage(total) * shape.layer_key_value_bytes
    shared = key_values if slices > 1 and shape.recompute != FULL else 0.0  # of slices: counted by itself
    kept = [0.0 if plan.spec.forward_only else (shape.kept_bytes(s, total) - shared) / slices for s in range(total)]
    late = [shape.kept_for_weights(s, total) / slices for s in range(total)]
    inside = kept_timeline(plan.programs[rank], stages, kept, late)  # the chunks' own activations
    pairs_of = load("key_values").key_values_timeline(plan, rank) if slices > 1 else repeat(0.0, len(plan.timed(rank)))
    walk, message, after = LifetimeWalk(plan, rank, deallocate), shape.message_bytes / slices, array("d")
    most, parts = 0.0, Parts()
    timelines = inside, walk.tensors(), recorded_timeline(plan, rank, deallocate), pairs_of, whole_timeline
    for kept_here, alive, recorded, pairs, whole_here in zip(*timelines, strict=True):
        passes = walk.now[KINDS["logits"]] * logits if logits else 0.0
        after.append(kept_here + passes + (alive + recorded) * message + pairs * key_values + whole_here)
        if after[-1] > most:
            outputs = walk.now[KINDS["outputs"]]
            tensors = outputs * message, (alive - outputs) * message, recorded * message
            most, parts = after[-1], Parts(kept_here + passes + pairs * key_values, *tensors, whole_here)
    copied = [kept[s] + (message if s > 0 else 0.0) for s in range(total)]  # a stage's input is offloaded too
    on_host = array("d", host_timeline(plan.programs[rank], stages, copied))
    return RankMemory(static, after, on_host, parts)


def peak_bytes(plan: Plan, shape: ModelShape) -> tuple[float, ...]:
    """Peak of every rank, static part included."""
    return tuple(rank_memory(plan, r, shape).peak for r in range(len(plan.programs)))

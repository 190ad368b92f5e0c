"""Memory in bytes: what a transformer keeps per microbatch and layer, and what that makes of a plan on every rank.

Activations of a layer are those of arXiv 2205.05198 (section 4, in bytes for 16-bit activations:
s b h (34 + 5 a s / h), less with tensor parallelism and recomputation); what weight gradients need after a split
backward is that of arXiv 2401.10241 (appendix: 32 s b h, more than the forward of a recomputed layer kept). Parameters,
gradients and optimizer states are those of Megatron's mixed-precision optimizer. A feature says where its plans differ
(``PlanHooks.bytes_of``). Messages that the allocator keeps back are counted as on NCCL
(``record_stream.py``); workspace of kernels and fragmentation are not.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from megatron_pp.common.names import unknown
from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.activations import host_timeline, kept_timeline
from megatron_pp.plan.hooks import FeatureBytes
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
    """Sizes that decide a transformer's memory. They are of the whole model, before any parallel split.

    num_layers, hidden_size, num_attention_heads, ffn_hidden_size (None: 4 h), vocab_size (0: no embedding and head)
    seq_length, micro_batch_size
    tensor_parallel, context_parallel, data_parallel  ranks; data_parallel > 1 means a distributed optimizer
    splits_optimizer   context-parallel ranks have one even where data_parallel is 1
    sequence_parallel  whether the parts outside tensor parallelism are split too
    recompute          none, selective or full
    element_bytes      of an activation and of a parameter: 2 for bf16
    gradient_bytes     of a gradient: 4 for fp32
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
    gradient_bytes: int = 4
    splits_optimizer: bool = False

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "seq_length", "micro_batch_size", "element_bytes", "gradient_bytes")
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
        """Bytes that one layer keeps of one microbatch between its forward and its backward."""
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
    def keeps_layers(self) -> bool:
        """Whether a layer keeps more than its input between its forward and its backward."""
        return self.recompute != FULL

    @property
    def layer_key_value_bytes(self) -> float:
        """Bytes that attention reads of other tokens in one layer and microbatch: keys, and values. They are part of
        ``layer_bytes`` unless the layer is recomputed.
        """
        return 2 * self.tokens * self.hidden_size * self.element_bytes / self.tensor_parallel

    @property
    def layer_weight_grad_bytes(self) -> float:
        """Bytes a layer holds per microbatch between input and weight gradients: inputs and output gradients of its
        four linear maps (two of each are whole on every tensor-parallel rank).
        """
        unit = self.tokens * self.hidden_size * self.element_bytes / 2
        outside = self.tensor_parallel if self.sequence_parallel else 1
        return unit * (8 / outside + 24 * self._ffn_share / self.tensor_parallel)

    @property
    def layer_parameters(self) -> float:
        h = self.hidden_size
        ffn = self.ffn_hidden_size or 4 * self.hidden_size
        return (4 * h * h + 2 * h * ffn) / self.tensor_parallel

    @property
    def bytes_per_parameter(self) -> float:
        """Parameter, gradient, and fp32 copy with two moments, which a distributed optimizer splits."""
        return self.element_bytes + self.gradient_bytes + 12 / self.optimizer_ranks

    @property
    def optimizer_ranks(self) -> int:
        """Ranks that each have a part of the optimizer's states: Megatron's group of data and context parallelism."""
        splits = self.splits_optimizer or self.data_parallel > 1
        return self.data_parallel * self.context_parallel if splits else 1

    @property
    def _ffn_share(self) -> float:
        """The feed-forward part has 16 of the 24 s b h inside tensor parallelism, at width 4 h (2205.05198, 4.1)."""
        return (8 + 16 * (self.ffn_hidden_size or 4 * self.hidden_size) / (4 * self.hidden_size)) / 24

    def layers_per_stage(self, num_stages: int) -> int:
        """Raises PlanError where the layers do not divide."""
        layers, left = divmod(self.num_layers, num_stages)
        if left:
            raise PlanError(f"{self.num_layers} layers do not divide over {num_stages} stages; a multiple of it would")
        return layers

    def kept_bytes(self, stage: int, num_stages: int) -> float:
        """Bytes that a stage keeps per microbatch from forward to backward, without its input (a pipeline tensor)."""
        kept = self.layers_per_stage(num_stages) * self.layer_bytes
        if stage > 0:
            kept = max(0.0, kept - self.message_bytes)
        return kept + (self.logits_bytes if stage == num_stages - 1 else 0.0)

    def kept_for_weights(self, stage: int, num_stages: int) -> float:
        """Bytes that a stage holds of a microbatch from its input gradients until its weight gradients are done."""
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
        """The number of parameters on a rank that holds ``stages``. ``output_share``: its share of the output layer."""
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
    whole        parameters and gradients that are whole only for a time
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
        """The most that is in host memory at the same time."""
        return max(self.on_host, default=0.0)


def rank_memory(plan: Plan, rank: int, shape: ModelShape, deallocate: bool = True) -> RankMemory:
    """Bytes of ``rank`` along its program. ``deallocate``: whether an output goes when it was sent. Raises PlanError
    where the layers do not divide over the stages.
    """
    stages = plan.placement.stages[rank]
    total = plan.placement.num_stages
    parts = plan.spec.num_parts
    added = [hooks.bytes_of(plan, rank, shape) for hooks in hooks_of(plan.spec.added, plan.placement.barriers)]
    static = next((one.static for one in added if one.static is not None), None)
    if static is None:
        static = shape.static_bytes(stages, total)
    shape = next((one.shape for one in added if one.shape is not None), shape)
    apart = sum(one.apart for one in added)
    kept = [0.0 if plan.spec.forward_only else (shape.kept_bytes(s, total) - apart) / parts for s in range(total)]
    late = [shape.kept_for_weights(s, total) / parts for s in range(total)]
    inside = kept_timeline(plan.programs[rank], stages, kept, late)  # the chunks' own activations
    walk = LifetimeWalk(plan, rank, deallocate)
    message = shape.message_bytes / parts
    after = array("d")
    most = 0.0
    largest = Parts()
    each = {KINDS[kind]: nbytes for one in added for kind, nbytes in one.each.items()}
    timelines = (
        inside,
        walk.tensors(),
        recorded_timeline(plan, rank, deallocate),
        *_further(added, len(plan.timed(rank))),
    )
    for kept_here, alive, recorded, further, whole in zip(*timelines, strict=True):
        counted = sum(walk.now[kind] * nbytes for kind, nbytes in each.items()) if each else 0.0
        after.append(kept_here + counted + (alive + recorded) * message + further + whole)
        if after[-1] > most:
            outputs = walk.now[KINDS["outputs"]]
            tensors = outputs * message, (alive - outputs) * message, recorded * message
            most = after[-1]
            largest = Parts(kept_here + counted + further, *tensors, whole)
    copied = [kept[s] + (message if s > 0 else 0.0) for s in range(total)]  # a stage's input goes to the host too
    on_host = array("d", host_timeline(plan.programs[rank], stages, copied))
    return RankMemory(static, after, on_host, largest)


def _further(added: Sequence[FeatureBytes], count: int) -> tuple[Iterator[float], Iterator[float]]:
    """Bytes that features add to activations, and to parameters and gradients, after each of ``count`` instructions."""
    kept = [one.kept for one in added if one.kept is not None]
    whole = [one.whole for one in added if one.whole is not None]
    return _sums(kept, count), _sums(whole, count)


def _sums(lines: Sequence[Iterable[float]], count: int) -> Iterator[float]:
    return map(sum, zip(*lines, strict=True)) if lines else repeat(0.0, count)


def peak_bytes(plan: Plan, shape: ModelShape) -> tuple[float, ...]:
    """Peak of every rank, static part included."""
    return tuple(rank_memory(plan, r, shape).peak for r in range(len(plan.programs)))

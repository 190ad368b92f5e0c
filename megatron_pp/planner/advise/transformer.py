"""A transformer's layers from its sizes and a GPU's rates: a first guess before anything is measured.

Operations are counted as in arXiv 2104.04473 (section 5.1, 2 per multiply and add), attention as causal; activations as
in ``simulate/memory.py``. A layer takes the longer of its operations, at a share of the GPU's peak, and its memory
traffic. Communication within tensor, context and expert parallel groups is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.slice_costs import attention_share
from megatron_pp.plan.names import unknown
from megatron_pp.plan.simulate.memory import FULL, ModelShape
from megatron_pp.planner.advise.model import DECODER, EMBEDDING, LOSS, MTP, Layer, Model

GB = 1e9
EFFICIENCY = 0.5  # of a GPU's peak that large matrix products reach


class Gpu(NamedTuple):
    """From data sheets: dense 16-bit operations per second, GB of memory, bytes per second of memory and of NVLink (or
    its like, per direction).
    """

    flops: float
    memory: float
    bandwidth: float
    link: float


GPUS = {
    "v100": Gpu(125e12, 32, 0.9e12, 150e9),
    "a100-40gb": Gpu(312e12, 40, 1.555e12, 300e9),
    "a100": Gpu(312e12, 80, 2.039e12, 300e9),
    "a800": Gpu(312e12, 80, 2.039e12, 200e9),
    "l40s": Gpu(362e12, 48, 0.864e12, 32e9),
    "h20": Gpu(148e12, 96, 4.0e12, 450e9),
    "h800": Gpu(989e12, 80, 3.35e12, 200e9),
    "h100": Gpu(989e12, 80, 3.35e12, 450e9),
    "h200": Gpu(989e12, 141, 4.8e12, 450e9),
    "b200": Gpu(2250e12, 180, 8.0e12, 900e9),
    "gb200": Gpu(2500e12, 186, 8.0e12, 900e9),
    "mi300x": Gpu(1307e12, 192, 5.3e12, 448e9),
}


def gpu_named(name: str) -> Gpu:
    """Raises PlanError for a name that is not in ``GPUS``."""
    found = GPUS.get(name.lower())
    if found is None:
        raise PlanError(unknown("GPU", name, GPUS))
    return found


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer, before any parallel split.

    shape              sizes, parallel ranks and micro-batch; its ``ffn_hidden_size`` is that of dense layers
    gated              SwiGLU and its like: three products in the feed-forward part
    query_groups       heads of keys and values; None: as many as heads
    experts, top_k     of MoE layers: how many there are, and how many a token goes through; 0: all layers are dense
    expert_hidden      width of an expert, shared_hidden that of the shared one
    moe_layers         1 for each MoE layer, 0 for each dense one, in model order
    expert_parallel    ranks that share the experts
    mtp_layers         multi-token prediction layers, whose losses are with the last stage's
    spread_mtp         or may lie, each by itself, on other stages (NVIDIA/Megatron-LM#5318 and #5329)
    """

    shape: ModelShape
    gated: bool = False
    query_groups: int | None = None
    experts: int = 0
    top_k: int = 1
    expert_hidden: int | None = None
    shared_hidden: int = 0
    moe_layers: tuple[int, ...] = ()
    expert_parallel: int = 1
    mtp_layers: int = 0
    spread_mtp: bool = False

    def model(self, gpu: Gpu, efficiency: float = EFFICIENCY) -> Model:
        """Its layers' costs on ``gpu``, where matrix products reach the share ``efficiency`` of the peak."""
        if not 0 < efficiency <= 1:
            raise PlanError(f"the efficiency is {efficiency:g}; it is the share of the peak that is reached, up to 1")
        shape = self.shape
        rate = _Rate(gpu.flops * efficiency, gpu.bandwidth)
        is_moe = self._is_moe
        if len(is_moe) != shape.num_layers:
            raise PlanError(f"MoE layers are given for {len(is_moe)} layers; the model has {shape.num_layers}")
        kinds = {moe: self._decoder(bool(moe), rate) for moe in set(is_moe)}
        layers = [self._embedding(rate)] if shape.vocab_size else []
        layers += [kinds[moe] for moe in is_moe]
        layers += [self._mtp(kinds[is_moe[-1]], rate)] * self.mtp_layers
        if shape.vocab_size:
            losses = 1 + self.mtp_layers
            layers += [self._loss(rate, 1)] * losses if self.spread_mtp else [self._loss(rate, losses)]
        share = attention_share(shape.seq_length, shape.hidden_size, self._width(bool(is_moe[0])))
        return Model(tuple(layers), shape.message_bytes / GB, share, self.flops())

    def flops(self) -> float:
        """Operations of a microbatch on one rank of each stage, forward and backward, nothing recomputed."""
        shape, is_moe = self.shape, self._is_moe
        forward = sum(2 * shape.tokens * self._active(bool(moe)) for moe in is_moe)
        forward += self.mtp_layers * 2 * shape.tokens * (self._active(bool(is_moe[-1])) + self._joined)
        attention = (shape.num_layers + self.mtp_layers) * self._attention
        head = (1 + self.mtp_layers) * self._head
        return 3 * (forward + attention + head)

    @property
    def _is_moe(self) -> tuple[int, ...]:
        return self.moe_layers or (1 if self.experts else 0,) * self.shape.num_layers

    @property
    def _attention(self) -> float:
        """Forward operations of the attention of one layer: two products with half of the sequence on average."""
        shape = self.shape
        return 2 * shape.tokens * shape.seq_length * shape.hidden_size / shape.tensor_parallel

    @property
    def _head(self) -> float:
        shape = self.shape
        return 2 * shape.tokens * shape.hidden_size * shape.vocab_size / shape.tensor_parallel

    @property
    def _joined(self) -> float:
        """Parameters of an MTP layer's product that joins two hidden states."""
        return 2 * self.shape.hidden_size**2 / self.shape.tensor_parallel

    def _attention_parameters(self) -> float:
        h, heads = self.shape.hidden_size, self.shape.num_attention_heads or 1
        groups = self.query_groups or heads
        return (2 * h * h + 2 * h * h * groups / heads) / self.shape.tensor_parallel

    def _dense(self, width: float) -> float:
        return (3 if self.gated else 2) * self.shape.hidden_size * width / self.shape.tensor_parallel

    @property
    def _ffn(self) -> int:
        return self.shape.ffn_hidden_size or 4 * self.shape.hidden_size

    def _active(self, moe: bool) -> float:
        """Parameters that each token meets in a layer."""
        if not moe:
            return self._attention_parameters() + self._dense(self._ffn)
        width = self.top_k * (self.expert_hidden or self._ffn) + self.shared_hidden
        return self._attention_parameters() + self._dense(width)

    def _held(self, moe: bool) -> float:
        """Parameters of a layer that a rank holds."""
        if not moe:
            return self._active(False)
        experts = self._dense((self.expert_hidden or self._ffn) * self.experts / self.expert_parallel)
        return self._attention_parameters() + experts + self._dense(self.shared_hidden)

    def _width(self, moe: bool) -> int:
        """Width of a feed-forward part with two products that keeps as much: a gated one keeps
        three tensors for two.
        """
        width = self.top_k * (self.expert_hidden or self._ffn) + self.shared_hidden if moe else self._ffn
        return int(width * (1.5 if self.gated else 1))

    def _decoder(self, moe: bool, rate: _Rate) -> Layer:
        shape = replace(self.shape, ffn_hidden_size=self._width(moe))
        routed = 2 * self.top_k * shape.message_bytes if moe else 0.0  # tokens on their way to experts, and back
        held, kept = self._held(moe), shape.layer_bytes + routed
        linear, times = 2 * shape.tokens * self._active(moe), shape.element_bytes
        forward = rate.time(linear + self._attention, times * held + 2 * kept)
        backward = rate.time(linear + 2 * self._attention, times * held + 2 * kept)
        weight = rate.time(linear, 8 * held + kept)  # fp32 gradients are read and written
        late, recomputed = shape.layer_weight_grad_bytes + routed, None
        if shape.recompute == FULL:
            backward += forward
        else:
            recomputed = replace(shape, recompute=FULL).layer_bytes / GB
        static = held * shape.bytes_per_parameter / GB
        return Layer(DECODER, forward, backward, weight, kept / GB, late / GB, recomputed, static)

    def _mtp(self, decoder: Layer, rate: _Rate) -> Layer:
        joined = rate.time(2 * self.shape.tokens * self._joined, self.shape.element_bytes * self._joined)
        return replace(
            decoder,
            kind=MTP,
            forward=decoder.forward + joined,
            backward_input=decoder.backward_input + joined,
            weight=decoder.weight + joined,
            recomputed=None,
            static=decoder.static + self._joined * self.shape.bytes_per_parameter / GB,
        )

    def _embedding(self, rate: _Rate) -> Layer:
        shape, table = self.shape, self.shape.vocab_size * self.shape.hidden_size / self.shape.tensor_parallel
        lookup = rate.time(0.0, 3 * shape.message_bytes)
        late = shape.message_bytes / GB
        return Layer(EMBEDDING, lookup, 0.0, lookup, 0.0, late, None, table * shape.bytes_per_parameter / GB)

    def _loss(self, rate: _Rate, losses: int) -> Layer:
        """The output layer and ``losses`` losses, whose logits have 32 bits."""
        shape = self.shape
        table = shape.vocab_size * shape.hidden_size / shape.tensor_parallel
        logits = shape.tokens * shape.vocab_size / shape.tensor_parallel
        forward = losses * rate.time(self._head, shape.element_bytes * table + 4 * logits)
        weight = losses * rate.time(self._head, 8 * table + 4 * logits)
        late = losses * (shape.message_bytes + shape.element_bytes * logits) / GB
        static = table * shape.bytes_per_parameter / GB
        return Layer(LOSS, forward, forward, weight, losses * 4 * logits / GB, late, None, static)


class _Rate(NamedTuple):
    """Operations and bytes per second."""

    flops: float
    bandwidth: float

    def time(self, flops: float, traffic: float) -> float:
        """Milliseconds."""
        return 1e3 * max(flops / self.flops, traffic / self.bandwidth)

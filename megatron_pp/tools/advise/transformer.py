"""Estimates the costs of a transformer's layers from its sizes and a GPU's rates, before anything is measured.

``layers/parts.py`` counts operations, memory and traffic of a layer's parts, and ``layers/gpus.py`` gives their times.
The time of a layer is the sum of matrix products, attention, element-wise operations and the exposed part of
collectives. Collectives of data parallelism, the optimizer, and kernel launches are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_pp.errors import PlanError
from megatron_pp.plan.simulate.memory import FULL
from megatron_pp.tools.advise.layers.gpus import GB, PROCESSORS, Gpu, Rates
from megatron_pp.tools.advise.layers.layer_sizes import LayerSizes
from megatron_pp.tools.advise.layers.parts import MIXERS, Part
from megatron_pp.tools.advise.model import (
    DECODER,
    EMBEDDING,
    LOSS,
    MTP,
    PATTERN,
    Layer,
    Model,
    total,
)

_BACKWARD = 2.5  # operations of attention's backward over its forward; it recomputes the scores (FlashAttention-2)


@dataclass(frozen=True)
class Transformer(LayerSizes):
    """A decoder-only or hybrid model. ``encoder`` is another model before the first layer, on the first stage."""

    encoder: Transformer | None = None

    def model(self, gpu: Gpu, efficiency: float | None = None) -> Model:
        """The costs of the layers on ``gpu``, if matrix products reach the share ``efficiency`` of its peak."""
        efficiency = gpu.efficiency if efficiency is None else efficiency
        if not 0 < efficiency <= 1:
            raise PlanError(f"the efficiency is {efficiency:g}; it is a share of the peak, above 0 and up to 1")
        if self.fp8 and not gpu.fp8:
            raise PlanError(
                "the model has 8-bit products (--fp8-format), but the GPU has none, or is given by --gpu-tflops"
            )
        shape = self.shape
        costs = _Costs(self, Rates(gpu, efficiency))
        main, last = self._letters()
        kinds = {letters: costs.layer(letters) for letters in {*main, last}}
        layers = [self._first(costs, gpu, efficiency)] if shape.vocab_size or self.encoder else []
        layers += [kinds[letters] for letters in main]
        layers += [costs.mtp(kinds[last])] * self.mtp_layers
        if shape.vocab_size:
            losses = 1 + self.mtp_layers
            layers += [costs.loss(1)] * losses if self.spread_mtp else [costs.loss(losses)]
        text = f"/{self.mtp_pattern}" * self.mtp_layers if self.mtp_pattern else ""
        parts = [part for letters in main for part in self.parts(letters)]
        share = _flops(part for part in parts if "core_attn" in part.modules) / _flops(parts)
        return Model(tuple(layers), shape.message_bytes / GB, share, self.flops(), mtp_pattern=text)

    def flops(self) -> float:
        """The operations of a microbatch on one rank of each stage, forward and backward, without recomputation."""
        shape = self.shape
        main, last = self._letters()
        forward = sum(_flops(self.parts(letters)) for letters in main)
        forward += self.mtp_layers * (_flops(self.parts(last)) + 2 * shape.tokens * self.joined)
        head = 2 * shape.tokens * shape.hidden_size * shape.vocab_size / shape.tensor_parallel
        first = self.encoder.flops() if self.encoder is not None else 0.0
        return 3 * (forward + (1 + self.mtp_layers) * head) + first

    def parts(self, letters: str) -> list[Part]:
        return [part for letter in letters for part in MIXERS[letter](self)]

    @property
    def joined(self) -> float:
        """The parameters of an MTP layer's product that joins two hidden states."""
        return 2 * self.shape.hidden_size**2 / self.shape.tensor_parallel

    def _letters(self) -> tuple[list[str], str]:
        """The letters of each layer's parts, and those of an MTP layer's parts."""
        if self.pattern:
            return list(self.pattern), self.mtp_pattern or self.pattern[-1]
        is_moe = self.moe_layers or (1 if self.experts else 0,) * self.shape.num_layers
        if len(is_moe) != self.shape.num_layers:
            raise PlanError(f"MoE layers are given for {len(is_moe)} layers, but the model has {self.shape.num_layers}")
        mixers = self.mixers or ("*" if self.latent is None else "+") * self.shape.num_layers
        found = [mixer + ("E" if moe else "-") for mixer, moe in zip(mixers, is_moe, strict=True)]
        return found, found[-1]

    def _first(self, costs: _Costs, gpu: Gpu, efficiency: float) -> Layer:
        """The embedding, with the encoder if there is one."""
        found = costs.embedding()
        if self.encoder is None:
            return found
        encoder = total(self.encoder.model(gpu, efficiency).layers)
        return replace(total([found, encoder]), kind=EMBEDDING, recomputed=None)


def _flops(parts: Iterable[Part]) -> float:
    return sum(part.core + part.flops for part in parts)


@dataclass(frozen=True)
class _Costs:
    """The costs of the layers of ``model`` at ``rates``."""

    model: Transformer
    rates: Rates

    def layer(self, letters: str) -> Layer:
        """A layer with attention or another mixer and a feed-forward part, or a layer of a hybrid model."""
        shape = self.model.shape
        parts = self.model.parts(letters)
        again = [part for part in parts if self.model.modules & {*part.modules}]
        forward = self._pass(parts, 1.0)
        backward = self._pass(parts, 2.0) + self._pass(again, 1.0)
        weight = sum(self._products(part, 8) for part in parts)  # fp32 gradients are read and written
        kept = sum(part.kept for part in parts) - sum(part.kept for part in again)
        late = sum(part.late for part in parts)
        recomputed = shape.message_bytes / GB
        if shape.recompute == FULL:
            backward += forward
            kept = shape.message_bytes
        dense, experts = (sum(getattr(part, name) for part in parts) for name in ("parameters", "experts"))
        static = dense * shape.bytes_per_parameter + experts * self._bytes_per_expert_parameter
        kind = PATTERN.get(letters.replace("w", "*"), DECODER)
        can = None if shape.recompute == FULL else recomputed
        return Layer(kind, forward, backward, weight, kept / GB, late / GB, can, static / GB)

    @property
    def _bytes_per_expert_parameter(self) -> float:
        """The bytes of an expert's parameter. The optimizer's states are split over the replicas of the expert."""
        shape = self.model.shape
        split = self.model.expert_parallel * self.model.expert_tensor
        replicas = max(1.0, shape.optimizer_ranks * shape.tensor_parallel / split) if shape.optimizer_ranks > 1 else 1.0
        return shape.element_bytes + shape.gradient_bytes + 12 / replicas

    def _products(self, part: Part, of_each: int) -> float:
        """The time of a part's matrix products. ``of_each`` is the bytes of memory traffic per parameter."""
        traffic = of_each * (part.parameters + part.experts) + part.operands
        return self.rates.products(part.flops, traffic, self.model.fp8) if part.flops else 0.0

    def _pass(self, parts: Iterable[Part], factor: float) -> float:
        """The milliseconds of a forward; with ``factor`` 2, of a backward without weight gradients."""
        parts = list(parts)
        nbytes = self.model.shape.element_bytes
        products = sum(self._products(p, nbytes) for p in parts)
        core = self.rates.attention(sum(p.core for p in parts)) * (_BACKWARD if factor > 1 else 1.0)
        moved = factor * sum(p.moved for p in parts)
        moved += (
            sum(p.operands for p in parts) if self.model.fp8 else 0.0
        )  # FP8 operands are read, and written in both layouts
        compute = products + core + self.rates.moved(moved)
        exposed = self._tensor(sum(p.tensor for p in parts), factor, products)
        exposed += self._context(sum(p.context for p in parts), factor, core)
        return compute + exposed + self._experts(sum(p.tokens for p in parts), compute)

    def _tensor(self, nbytes: float, factor: float, products: float) -> float:
        """The exposed time of tensor-parallel collectives. In a backward, Megatron hides half of them behind products
        with sequence parallelism, and all of them otherwise. With user buffers, collectives are in as many pieces as
        there are ranks, and only the first piece is exposed.
        """
        shape = self.model.shape
        if factor > 1:
            nbytes *= 0.5 if shape.sequence_parallel else 0.0
        time = self.rates.sent(nbytes, shape.tensor_parallel > self.rates.gpu.domain)
        return max(time / shape.tensor_parallel, time - products) if self.model.hides[1] else time

    def _context(self, nbytes: float, factor: float, core: float) -> float:
        """The exposed time of context-parallel collectives. A ring runs during attention. In a backward it also carries
        the gradients of keys and values."""
        shape = self.model.shape
        kind = self.model.context_comm
        ranks = shape.tensor_parallel * shape.context_parallel
        time = self.rates.sent(nbytes, ranks > self.rates.gpu.domain) * (1.0 if kind == "a2a" else factor)
        return max(0.0, time - core) if kind == "p2p" else time

    def _experts(self, nbytes: float, compute: float) -> float:
        """The exposed time to send tokens to the experts and back, over links and network at the same time. ``nbytes``
        is the size of one copy of this rank's tokens."""
        model = self.model
        ranks = self.model.expert_parallel
        near = min(ranks, max(1, self.rates.gpu.domain // model.expert_tensor))
        domains = ranks / near
        if model.once:
            to_domains = _reached(domains, model.top_k)
            to_ranks = _reached(ranks, model.top_k)
            if model.groups[1]:
                to_domains = min(to_domains, max(1.0, domains * model.groups[0] / model.groups[1]))
        else:
            to_domains = to_ranks = model.top_k
        network = self.rates.sent(nbytes * to_domains * (1 - 1 / domains), True)
        link = self.rates.sent(nbytes * to_ranks * (near - 1) / (near if model.once else ranks), False)
        time = 2 * max(network, link)
        if not model.hides[0]:
            return time
        beside = min(time, compute)  # compute during this time has fewer multiprocessors and is slower
        return time - beside + beside * PROCESSORS / (1 - PROCESSORS)

    def mtp(self, last: Layer) -> Layer:
        shape = self.model.shape
        joined = self.model.joined
        time = self.rates.products(2 * shape.tokens * joined, shape.element_bytes * joined)
        times = {name: getattr(last, name) + time for name in ("forward", "backward_input", "weight")}
        static = last.static + joined * shape.bytes_per_parameter / GB
        return replace(last, kind=MTP, recomputed=None, static=static, **times)

    def embedding(self) -> Layer:
        shape = self.model.shape
        table = shape.vocab_size * shape.hidden_size / shape.tensor_parallel
        lookup = self.rates.moved(3 * shape.message_bytes) if shape.vocab_size else 0.0
        late = shape.message_bytes / GB
        return Layer(EMBEDDING, lookup, 0.0, lookup, 0.0, late, None, table * shape.bytes_per_parameter / GB)

    def loss(self, losses: int) -> Layer:
        """The output layer and ``losses`` losses. Their logits have 32 bits."""
        shape = self.model.shape
        table = shape.vocab_size * shape.hidden_size / shape.tensor_parallel
        logits = shape.tokens * shape.vocab_size / shape.tensor_parallel
        flops = 2 * shape.tokens * table
        forward = losses * self.rates.products(flops, shape.element_bytes * table + 4 * logits)
        weight = losses * self.rates.products(flops, 8 * table + 4 * logits)
        late = losses * (shape.message_bytes + shape.element_bytes * logits) / GB
        static = table * shape.bytes_per_parameter / GB
        return Layer(LOSS, forward, forward, weight, losses * 4 * logits / GB, late, None, static)


def _reached(places: float, copies: int) -> float:
    """The expected number of ``places`` that get at least one of ``copies``, each sent to a random place."""
    return places * (1 - (1 - 1 / places) ** copies)

"""A model as a sequence of layers, and what each costs a pipeline. Times in milliseconds, memory in GB (10^9 bytes)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.activations import WEIGHT_SHARE

EMBEDDING, DECODER, MTP, LOSS, PART = "embedding", "decoder", "mtp", "loss", "part"
LETTERS = {EMBEDDING: "E", DECODER: "t", MTP: "m", LOSS: "L"}
"""How Megatron's ``pipeline_model_parallel_layout`` writes them."""

PATTERN = {
    "M": "mamba",
    "G": "linear attention",
    "*": "attention",
    "+": "latent attention",
    "D": "sparse attention",
    "-": "feed-forward",
    "E": "experts",
}
"""Kinds of a hybrid model's layers, by the letters of Megatron's ``--hybrid-layer-pattern``."""

RECOMPUTED_SHARE = 2 / 34
"""Of a transformer layer's activations, its input: what is kept where the layer is recomputed (arXiv 2205.05198)."""

STEPS = 4
"""Parts of a stage whose layers are not known: it is recomputed in quarters."""


@dataclass(frozen=True)
class Layer:
    """What one layer costs for one microbatch.

    kind         a key of LETTERS, a kind of PATTERN, or PART: a share of a model whose layers are not known
    forward, backward_input, weight  milliseconds of F, I and W
    activation   GB that a forward keeps until its backward
    late         GB of it that a split backward keeps until its weight gradients
    recomputed   GB that a forward keeps where the layer is recomputed; None: it cannot be
    static       GB of parameters, gradients and optimizer states
    """

    kind: str
    forward: float
    backward_input: float
    weight: float
    activation: float = 0.0
    late: float = 0.0
    recomputed: float | None = None
    static: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "kind" and value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{field.name} of a {self.kind} is {value}; it must be finite and at least 0")

    @property
    def work(self) -> float:
        return self.forward + self.backward_input + self.weight

    @property
    def least(self) -> float:
        """GB that a forward keeps at least."""
        return self.activation if self.recomputed is None else self.recomputed

    @property
    def saved(self) -> float:
        """GB that recomputation saves."""
        return self.activation - self.least

    def share(self, parts: int) -> Layer:
        """One of ``parts`` equal parts of the layer."""
        return self.scaled(1 / parts, self.static / parts)

    def scaled(self, factor: float, static: float) -> Layer:
        """Times and activations in proportion, and GB of ``static`` memory."""
        kept = None if self.recomputed is None else factor * self.recomputed
        times = (factor * self.forward, factor * self.backward_input, factor * self.weight)
        return Layer(self.kind, *times, factor * self.activation, factor * self.late, kept, static)


def layer(
    kind: str, forward: float, backward_input: float, weight: float, activation: float = 0.0, static: float = 0.0
) -> Layer:
    """A layer whose late and recomputed memory are those of a transformer layer, as shares of its activation."""
    recomputed = RECOMPUTED_SHARE * activation if kind in (DECODER, PART) else None
    return Layer(kind, forward, backward_input, weight, activation, WEIGHT_SHARE * activation, recomputed, static)


@dataclass(frozen=True)
class Model:
    """Layers in model order, for a microbatch of one size.

    layers      ``share`` of a model whose layers are not known is one PART
    message     GB of one activation between stages
    attention   share of causal attention in the times, by which slices of a sequence differ
    flops       floating point operations of a whole microbatch (forward and backward); None where not known
    output      the output layer with its loss where it is split over all ranks, and so no layer of a stage
    mtp_pattern how a hybrid model's pattern ends: ``/*E/*E`` for two MTP layers
    """

    layers: tuple[Layer, ...]
    message: float = 0.0
    attention: float = 0.0
    flops: float | None = None
    output: Layer | None = None
    mtp_pattern: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("the model has no layers; give at least one")
        if not 0 <= self.attention <= 1:
            raise PlanError(f"the share of attention is {self.attention:g}; it must lie between 0 and 1")
        if not any(one.forward + one.backward_input for one in self.layers):
            raise PlanError("all times of the model are 0; give the time of a forward and of a backward")

    @property
    def is_fluid(self) -> bool:
        """Whether the layers are not known, so that the model can be cut anywhere."""
        return all(one.kind == PART for one in self.layers)

    @property
    def can_split_output(self) -> bool:
        """Whether there is one loss, at the end, that no layer for multi-token prediction shares."""
        kinds = [one.kind for one in self.layers]
        return kinds[-1] == LOSS and kinds.count(LOSS) == 1 and MTP not in kinds and len(kinds) > 1

    def times(self, factor: float) -> Model:
        """Microbatches of ``factor`` times the size, in proportion."""
        layers = tuple(one.scaled(factor, one.static) for one in self.layers)
        return replace(self, layers=layers, message=factor * self.message, flops=self.flops and factor * self.flops)

    def units(self, num_stages: int, mtp_with_loss: bool = False) -> tuple[tuple[Layer, ...], ...]:
        """What cannot be cut apart, in model order: each layer, but all MTP layers together unless their losses are
        spread (Megatron builds them on one stage; ``mtp_with_loss``: on the last); of a fluid model, parts of equal
        stages. Raises PlanError where unequal parts cannot be regrouped, or where layers are fewer than stages.
        """
        if self.is_fluid:
            return tuple((part.share(STEPS),) * STEPS for part in _regrouped(self.layers, num_stages))
        units: list[tuple[Layer, ...]] = []
        spread = spreads_mtp(self.layers)
        for one in self.layers:
            if not spread and units and units[-1][0].kind == MTP and (one.kind == MTP or mtp_with_loss):
                units[-1] = (*units[-1], one)
            else:
                units.append((one,))
        if len(units) < num_stages:
            raise PlanError(f"{len(units)} layers, embedding and loss included, cannot fill {num_stages} stages")
        return tuple(units)


def _regrouped(parts: Sequence[Layer], count: int) -> list[Layer]:
    if len(parts) < count:
        if count % len(parts):
            raise PlanError(f"costs of {len(parts)} parts cannot be cut into {count} stages; a multiple of it can")
        size = count // len(parts)
        return [part.share(size) for part in parts for _ in range(size)]
    if len(parts) % count:
        raise PlanError(f"costs of {len(parts)} parts cannot be joined to {count} stages; a divisor of it can")
    size = len(parts) // count
    return [total(parts[i : i + size]) for i in range(0, len(parts), size)]


def is_hybrid(layers: Iterable[Layer]) -> bool:
    """Whether some are of a hybrid model, whose mixers are layers of their own."""
    return any(one.kind in PATTERN.values() for one in layers)


def spreads_mtp(layers: Iterable[Layer]) -> bool:
    """Whether MTP layers and their losses may lie on different stages, as NVIDIA/Megatron-LM#5318 and #5329 build them:
    where every loss is a layer of its own.
    """
    return sum(one.kind == LOSS for one in layers) > 1


def total(layers: Sequence[Layer]) -> Layer:
    """All of them as one."""
    can = any(one.recomputed is not None for one in layers)
    return Layer(
        PART,
        forward=sum(one.forward for one in layers),
        backward_input=sum(one.backward_input for one in layers),
        weight=sum(one.weight for one in layers),
        activation=sum(one.activation for one in layers),
        late=sum(one.late for one in layers),
        recomputed=sum(one.least for one in layers) if can else None,
        static=sum(one.static for one in layers),
    )

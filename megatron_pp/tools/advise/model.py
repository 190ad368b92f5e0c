"""A model as a sequence of layers with their costs. Times are in milliseconds, memory is in GB (10^9 bytes)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.activations import WEIGHT_SHARE

EMBEDDING = "embedding"
DECODER = "decoder"
MTP = "mtp"
LOSS = "loss"
PART = "part"
LETTERS = {EMBEDDING: "E", DECODER: "t", MTP: "m", LOSS: "L"}
"""The letters of layers in Megatron's ``pipeline_model_parallel_layout``."""

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
"""The share of a transformer layer's input in its activations: a recomputed layer keeps only its input (arXiv
2205.05198)."""

STEPS = 4
"""A stage whose layers are not known has this number of parts, each of which can be recomputed."""


@dataclass(frozen=True)
class Layer:
    """The costs of one layer for one microbatch.

    kind         a key of LETTERS, a kind of PATTERN, or PART: a share of a model whose layers are not known
    forward, backward_input, weight  milliseconds of F, I and W
    activation   GB that a forward keeps until its backward
    late         GB of it that a split backward keeps until its weight gradients
    recomputed   GB that a forward keeps if the layer is recomputed; None if it cannot be recomputed
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
        """The least GB that a forward keeps."""
        return self.activation if self.recomputed is None else self.recomputed

    @property
    def saved(self) -> float:
        """The GB that recomputation saves."""
        return self.activation - self.least

    def share(self, parts: int) -> Layer:
        """One of ``parts`` equal parts of the layer."""
        return self.scaled(1 / parts, self.static / parts)

    def scaled(self, factor: float, static: float) -> Layer:
        """The layer with its times and activations times ``factor``, and with ``static`` GB of parameters and
        states."""
        kept = None if self.recomputed is None else factor * self.recomputed
        times = (factor * self.forward, factor * self.backward_input, factor * self.weight)
        return Layer(self.kind, *times, factor * self.activation, factor * self.late, kept, static)


def layer(
    kind: str, forward: float, backward_input: float, weight: float, activation: float = 0.0, static: float = 0.0
) -> Layer:
    """A layer whose late and recomputed memory are the shares of its activation that a transformer layer has."""
    recomputed = RECOMPUTED_SHARE * activation if kind in (DECODER, PART) else None
    return Layer(kind, forward, backward_input, weight, activation, WEIGHT_SHARE * activation, recomputed, static)


@dataclass(frozen=True)
class Model:
    """Layers in model order, for a microbatch of one size.

    layers      if the layers are not known, each share of the model is one PART
    message     GB of one activation between stages
    attention   share of causal attention in the times; it makes later slices of a sequence more expensive
    flops       floating point operations of a whole microbatch (forward and backward); None if not known
    output      the output layer with its loss, if it is split over all ranks and so not in ``layers``
    mtp_pattern end of a hybrid model's pattern: ``/*E/*E`` for two MTP layers
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
            raise PlanError(f"the share of attention is {self.attention:g}; it must be from 0 to 1")
        if not any(one.forward + one.backward_input for one in self.layers):
            raise PlanError("all times of the model are 0; give the time of a forward and of a backward")

    @property
    def is_fluid(self) -> bool:
        """Whether the layers are not known. The model can then be divided anywhere."""
        return all(one.kind == PART for one in self.layers)

    @property
    def can_split_output(self) -> bool:
        """Whether the model has a single loss at its end and no layers for multi-token prediction."""
        kinds = [one.kind for one in self.layers]
        return kinds[-1] == LOSS and kinds.count(LOSS) == 1 and MTP not in kinds and len(kinds) > 1

    def times(self, factor: float) -> Model:
        """The model for microbatches of ``factor`` times the size. Costs grow in proportion."""
        layers = tuple(one.scaled(factor, one.static) for one in self.layers)
        return replace(self, layers=layers, message=factor * self.message, flops=self.flops and factor * self.flops)

    def units(self, num_stages: int, mtp_with_loss: bool = False) -> tuple[tuple[Layer, ...], ...]:
        """The units that stay on one stage, in model order.

        A unit is a layer. All MTP layers are one unit, because Megatron builds them on one stage, unless their losses
        are spread; with ``mtp_with_loss`` the unit also has the loss. In a fluid model, units are parts of equal
        stages. Raises PlanError if parts cannot be regrouped, or if there are fewer units than stages.
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
            raise PlanError(
                f"{len(parts)} parts cannot be divided into {count} stages; give a multiple of {len(parts)}"
            )
        size = count // len(parts)
        return [part.share(size) for part in parts for _ in range(size)]
    if len(parts) % count:
        raise PlanError(f"{len(parts)} parts cannot be joined to {count} stages; give a divisor of {len(parts)}")
    size = len(parts) // count
    return [total(parts[i : i + size]) for i in range(0, len(parts), size)]


def is_hybrid(layers: Iterable[Layer]) -> bool:
    """Whether the layers are those of a hybrid model, in which mixers and feed-forward parts are separate layers."""
    return any(one.kind in PATTERN.values() for one in layers)


def spreads_mtp(layers: Iterable[Layer]) -> bool:
    """Whether MTP layers and their losses may be on different stages, as NVIDIA/Megatron-LM#5318 and #5329 build them.
    In such a model each loss is a separate layer.
    """
    return sum(one.kind == LOSS for one in layers) > 1


def total(layers: Sequence[Layer]) -> Layer:
    """The sum of the layers, as one layer."""
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

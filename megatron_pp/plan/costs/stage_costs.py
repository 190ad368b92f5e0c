"""Costs of a plan's instructions: compute and memory per stage, transfers per directed link.

Times are in one unit of the caller's choice, the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.cost_hooks import COST_DEFAULTS, STAGE_TIMES, cost_hooks
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.feature import Settings, takes_settings
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD
from megatron_pp.plan.ir.placement import Placement

if TYPE_CHECKING:
    from megatron_pp.plan.costs.added_costs import CostSettings
else:
    from megatron_pp.plan.costs.cost_hooks import CostSettings

_TIMES = ("forward", "backward", "backward_input", "weight")


@takes_settings
@dataclass(frozen=True)
class StageCosts(CostSettings):
    """Time of each compute operation of one microbatch, per stage in model order (not per rank).

    forward         F
    backward        B: input and weight gradients together
    backward_input  I: input gradients only
    weight          W
    microbatches    what each microbatch costs of these times, in the order in which they run; empty: all cost the same
    added           costs of features that are not their defaults, by name in the order of ``COST_DEFAULTS``. Each is an
                    argument and an attribute by its own name (``feature_table.py``: ``stage_times``, ``other_costs``)

    Raises PlanError for lists of different lengths, and for times that are negative or not finite.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    weight: tuple[float, ...]
    microbatches: tuple[float, ...] = ()
    added: Settings = ()

    def __post_init__(self) -> None:
        for name in (*_TIMES[1:], *STAGE_TIMES):
            if len(getattr(self, name)) != len(self.forward):
                given = len(getattr(self, name))
                raise PlanError(f"costs of {name} are given for {given} stages, of forward for {len(self.forward)}")
        for mb, value in enumerate(self.microbatches):
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"microbatch {mb} costs {value} of the times; it must be finite and above 0")
        kept = [(name, cost) for name, cost in self.added if not self._is_default(name, cost)]
        object.__setattr__(self, "added", tuple(kept))
        for hooks in cost_hooks(self.added):
            hooks.check(self)
        for name in (*_TIMES, *STAGE_TIMES):
            for stage, value in enumerate(getattr(self, name)):
                if not (math.isfinite(value) and value >= 0):
                    raise PlanError(f"the {name} time of stage {stage} is {value}; it must be finite and at least 0")

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        weight: float = 1.0,
        backward: float | None = None,
    ) -> StageCosts:
        """The same times for every stage, by default the field's unit costs, F = I = W = 1; an unsplit backward costs
        ``backward_input + weight`` unless given.
        """
        whole = backward_input + weight if backward is None else backward
        n = num_stages
        return cls((forward,) * n, (whole,) * n, (backward_input,) * n, (weight,) * n)

    @classmethod
    def per_stage(
        cls,
        forward: Sequence[float],
        backward_input: Sequence[float],
        weight: Sequence[float],
        backward: Sequence[float] | None = None,
    ) -> StageCosts:
        """Lists with one entry per stage; an unsplit backward costs the sum of I and W unless given."""
        whole = [b + w for b, w in zip(backward_input, weight, strict=False)] if backward is None else backward
        return cls(tuple(forward), tuple(whole), tuple(backward_input), tuple(weight))

    def regrouped(self, count: int) -> StageCosts:
        """The costs of ``count`` equal stages of the same model. Raises PlanError unless it is a multiple or a
        divisor.
        """
        n = self.num_stages
        if n % count and count % n:
            raise PlanError(f"times of {n} stages cannot be regrouped into {count}; give a multiple or a divisor of it")
        lists: dict[str, Any] = {name: regrouped(getattr(self, name), count) for name in (*_TIMES, *STAGE_TIMES)}
        return replace(self, **lists)

    def placed(self, placement: Placement) -> StageCosts:
        """The costs of a plan with this placement."""
        costs = self
        for hooks in cost_hooks(self.added):
            costs = hooks.placed(costs, placement)
        return costs

    def with_last(self, forward: float, backward: float, backward_input: float, weight: float) -> StageCosts:
        """The costs with these times more on the last stage."""
        grown: dict[str, Any] = {}
        for name, more in zip(_TIMES, (forward, backward, backward_input, weight), strict=True):
            times = getattr(self, name)
            grown[name] = (*times[:-1], times[-1] + more)
        return replace(self, **grown)

    def of(self, op: str, stage: int) -> float:
        """Time of a single compute operation, copy or collective of ``stage``, of a whole microbatch."""
        return self._by_op[op][stage]

    def of_parts(self, parts: int) -> tuple[float, ...]:
        """The share of each part of a microbatch in these times."""
        if parts > 1:
            for hooks in cost_hooks(self.added):
                if (shares := hooks.parts(self, parts)) is not None:
                    return shares
        return (1 / parts,) * parts

    @cached_property
    def joined_sends(self) -> tuple[float, float]:
        """The shares of the time of joined operations after which an activation and a gradient are there, where they
        are sent within that time; (1, 1): at its end.
        """
        found = (hooks.sends(self) for hooks in cost_hooks(self.added))
        return next((shares for shares in found if shares is not None), (1.0, 1.0))

    def of_microbatches(self, count: int) -> tuple[float, ...]:
        """The cost of each of ``count`` microbatches in these times. Raises PlanError for another count."""
        if not self.microbatches:
            return (1.0,) * count
        if len(self.microbatches) != count:
            raise PlanError(f"costs are given for {len(self.microbatches)} microbatches; the plan has {count}")
        return self.microbatches

    @staticmethod
    def _is_default(name: str, cost: Any) -> bool:
        return bool(cost == COST_DEFAULTS[name]) or (name in STAGE_TIMES and not any(cost))

    @cached_property
    def _by_op(self) -> dict[str, tuple[float, ...]]:
        of_all: dict[str, float] = dict.fromkeys(ins.PASSES, 0.0)
        for hooks in cost_hooks(self.added):
            of_all |= hooks.times(self)
        return {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            ins.INPUT_GRAD: self.backward_input,
            ins.WEIGHT_GRAD: self.weight,
            **{op: (time,) * self.num_stages for op, time in of_all.items()},
            **{op: getattr(self, name) for name, ops in STAGE_TIMES.items() for op in ops},
        }


def regrouped(times: tuple[float, ...], count: int) -> tuple[float, ...]:
    """The times of ``count`` equal stages of the same model; one number is a multiple of the other."""
    if len(times) >= count:
        size = len(times) // count
        return tuple(sum(times[i * size : (i + 1) * size]) for i in range(count))
    size = count // len(times)
    return tuple(time / size for time in times for _ in range(size))


@dataclass(frozen=True)
class MemoryModel:
    """Activation memory, in any unit.

    limits   per rank; infinity for none
    forward  per stage: what a forward keeps until its backward
    weight   per stage: what a split backward keeps until its weight gradient
    """

    limits: tuple[float, ...]
    forward: tuple[float, ...]
    weight: tuple[float, ...]

    @classmethod
    def in_chunks(cls, placement: Placement, limit: float) -> MemoryModel:
        """Every forward counts 1 until its weight gradient is done: the papers' count."""
        ones = (1.0,) * placement.num_stages
        return cls((limit,) * placement.pipeline_size, ones, ones)


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: a transfer is on the wire for bytes / ``bandwidth`` (bytes per unit of time) and
    arrives ``latency`` later. Transfers take turns, in the order in which they became ready.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise PlanError(f"the latency of a link is {self.latency}; it must be a finite number of at least 0")
        if not self.bandwidth > 0:
            raise PlanError(f"the bandwidth of a link is {self.bandwidth}; it must be above 0")

    def wire_time(self, size: float) -> float:
        return size / self.bandwidth


@dataclass(frozen=True)
class Network:
    """The cost of a transfer between two ranks.

    activation_bytes, gradient_bytes  size of a message of a whole microbatch; a gradient's by default the activation's
    link    every directed link that ``links`` does not name
    links   (source rank, destination rank) -> its own Link
    gloo    transfers as gloo makes them: a send starts once its receive is announced, and the announcement travels
            behind the data of the other direction, as two ranks have one connection; from GLOO_DETACHED_BYTES on,
            one-way channels have a connection each and announcements take no time
    """

    activation_bytes: float = 0.0
    gradient_bytes: float | None = None
    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    gloo: bool = False

    def __post_init__(self) -> None:
        for name, value in (("activation_bytes", self.activation_bytes), ("gradient_bytes", self.gradient_bytes)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{name} is {value}; it must be a finite number of at least 0")

    def message_bytes(self, kind: str) -> float:
        """Size of a message of ``kind`` FORWARD (activation) or BACKWARD (gradient)."""
        if kind == BACKWARD and self.gradient_bytes is not None:
            return self.gradient_bytes
        return self.activation_bytes

    def message_time(self, kind: str, source: int, target: int, parts: int = 1) -> float:
        """Time of a message of ``kind``, or of one of its parts, from rank ``source`` to ``target``."""
        link = self.between(source, target)
        return link.latency + link.wire_time(self.message_bytes(kind) / parts)

    def collective_time(self, kind: str | None, ranks: int) -> float:
        """Time of a collective of ``ranks`` ranks, along a tree of ``link`` in pieces. ``kind``: of the message that it
        moves; None: no size.
        """
        hops = math.ceil(math.log2(ranks)) if ranks > 1 else 0
        size = 0.0 if kind is None else self.message_bytes(kind)
        return hops * self.link.latency + (self.link.wire_time(size) if hops else 0.0)

    def between(self, source: int, target: int) -> Link:
        return self.links.get((source, target), self.link)


FREE = Network()

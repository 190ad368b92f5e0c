"""What was measured of a model on its machines: the input of the schedule ``auto``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from megatron_pp.errors import ExchangeError, PlanError
from megatron_pp.plan.costs import WEIGHT_SHARE, Link, MemoryModel, Network, StageCosts
from megatron_pp.plan.files import read_text
from megatron_pp.plan.placement import Placement


@dataclass(frozen=True)
class Measured:
    """Times and memory of one microbatch, per stage in model order (not per rank). One number stands for the same on
    every stage.

    forward, backward_input, weight  times of F, B and W, in any one unit
    backward           time of an unsplit backward; B + W where not given
    transfer           time of one activation or gradient between two ranks, in the same unit
    memory_limit       per rank (or one number), in the unit of ``activation``; none where not given
    activation         memory that a forward keeps until its backward
    weight_activation  what a split backward keeps of it until its weight gradient; where not given, the share that a
                       transformer layer has (``costs.WEIGHT_SHARE``). ``measure_footprint`` measures
                       both
    offload            copy of what a forward keeps, one way between device and host; without it nothing is offloaded

    Raises PlanError for negative or non-finite times, and lists of a wrong length where they meet a pipeline.
    """

    forward: float | tuple[float, ...] = 1.0
    backward_input: float | tuple[float, ...] = 1.0
    weight: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] | None = None
    transfer: float = 0.0
    memory_limit: float | tuple[float, ...] | None = None
    activation: float | tuple[float, ...] = 1.0
    weight_activation: float | tuple[float, ...] | None = None
    offload: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, field.name, tuple(value))
                value = tuple(value)
            for number in value if isinstance(value, tuple) else (value,):
                _check_number(field.name, number, field.default is None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """From what a JSON file holds, under the names above. Raises PlanError for a name that is not one of them."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise PlanError(f"measured values {', '.join(unknown)} are not known; they are {', '.join(known)}")
        return cls(**values)

    def costs(self, num_stages: int) -> StageCosts:
        """Times per stage."""
        backward = None if self.backward is None else self._each("backward", num_stages)
        forward, backward_input, weight = (
            self._each(name, num_stages) for name in ("forward", "backward_input", "weight")
        )
        costs = StageCosts.per_stage(forward, backward_input, weight, backward)
        return costs if self.offload is None else replace(costs, offload=self._each("offload", num_stages))

    def network(self) -> Network:
        """Every link takes ``transfer``, and any number of transfers at a time."""
        return Network(link=Link(latency=self.transfer))

    def memory(self, placement: Placement) -> MemoryModel:
        """Memory per stage, and the limit per rank."""
        stages, ranks = placement.num_stages, placement.pipeline_size
        limits = (math.inf,) * ranks if self.memory_limit is None else self._each("memory_limit", ranks, "ranks")
        activation = self._each("activation", stages)
        if self.weight_activation is None:
            return MemoryModel(limits, activation, tuple(WEIGHT_SHARE * value for value in activation))
        return MemoryModel(limits, activation, self._each("weight_activation", stages))

    def _each(self, name: str, count: int, what: str = "stages") -> tuple[float, ...]:
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * count
        if len(value) != count:
            raise PlanError(f"measured {name} is given for {len(value)} {what}; there are {count}")
        return value


def measured_values(given: Measured | Mapping[str, Any] | str | None) -> Measured | None:
    """A Measured, a dict of its fields, or the path of a JSON file that holds such a dict (read once per process).

    Raises PlanError; ExchangeError (one too) for a file that cannot be read.
    """
    if isinstance(given, str):
        return _from_file(given)
    if isinstance(given, Mapping):
        return Measured.from_dict(given)
    if given is not None and not isinstance(given, Measured):
        raise PlanError(f"{given!r} is no Measured, no dict of its fields and no path of a JSON file")
    return given


@lru_cache(maxsize=16)
def _from_file(path: str) -> Measured:
    text = read_text(path)
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise PlanError("it holds no object with measured values by name")
        return Measured.from_dict(content)
    except (ValueError, RecursionError) as error:  # PlanError is a ValueError
        raise ExchangeError(f"{path}: {error}") from error


def _check_number(name: str, value: Any, may_be_none: bool) -> None:
    if value is None and may_be_none:
        return
    # Whole numbers may be larger than any float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        shown = "beyond all floats" if isinstance(value, int) and value > sys.float_info.max else repr(value)
        raise PlanError(f"measured {name} is {shown}; it must be a finite number of at least 0, or a list of them")

"""What was measured of a model on its machines: the input of the schedule ``auto``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**given)

    def costs(self, num_stages: int) -> StageCosts:
        """Times per stage."""
        backward = None if self.backward is None else _per("backward", self.backward, num_stages, "stages")
        return StageCosts.per_stage(
            _per("forward", self.forward, num_stages, "stages"),
            _per("backward_input", self.backward_input, num_stages, "stages"),
            _per("weight", self.weight, num_stages, "stages"),
            backward,
        )

    def network(self) -> Network:
        """Every link takes ``transfer``, and any number of transfers at a time."""
        return Network(link=Link(latency=self.transfer))

    def memory(self, placement: Placement) -> MemoryModel:
        """Memory per stage, and the limit per rank."""
        limit = math.inf if self.memory_limit is None else self.memory_limit
        activation = _per("activation", self.activation, placement.num_stages, "stages")
        kept = tuple(WEIGHT_SHARE * value for value in activation)
        if self.weight_activation is not None:
            kept = _per("weight_activation", self.weight_activation, placement.num_stages, "stages")
        return MemoryModel(_per("memory_limit", limit, placement.pipeline_size, "ranks"), activation, kept)


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


def _per(name: str, value: float | tuple[float, ...], count: int, what: str) -> tuple[float, ...]:
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        raise PlanError(f"measured {name} is given for {len(value)} {what}; there are {count}")
    return value

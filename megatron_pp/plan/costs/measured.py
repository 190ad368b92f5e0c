"""Values measured of a model on its machines: the input of the schedule ``auto``, and the file that holds it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from megatron_pp.errors import FileFormatError, PlanError
from megatron_pp.plan.costs.activations import WEIGHT_SHARE
from megatron_pp.plan.costs.cost_hooks import MEASURED_DEFAULTS
from megatron_pp.plan.costs.files import read_text
from megatron_pp.plan.costs.stage_costs import Link, MemoryModel, Network, StageCosts
from megatron_pp.plan.ir.feature import Settings, all_values, takes_settings
from megatron_pp.plan.ir.placement import Placement

if TYPE_CHECKING:
    from megatron_pp.plan.costs.added_costs import MeasuredSettings
else:
    from megatron_pp.plan.costs.cost_hooks import MeasuredSettings

MS = {"ms": 1.0, "s": 1e3}
"""Unit of times in a file -> in milliseconds."""
GB = {"GB": 1.0, "bytes": 1e-9}
"""Unit of memory in a file -> in GB (10^9 bytes)."""


@takes_settings
@dataclass(frozen=True)
class Measured(MeasuredSettings):
    """Times and memory of one microbatch, per stage in model order (not per rank); one number is for every stage.

    forward, backward_input, weight  times of F, I and W, in any one unit
    backward           time of an unsplit backward; I + W where not given
    transfer           time of one activation or gradient between two ranks, in the same unit
    memory_limit       per rank (or one number), in the unit of ``activation``; none where not given
    activation         memory that a forward keeps until its backward
    weight_activation  what a split backward keeps of it until its weight gradient; where not given, the share of a
                       transformer layer (``WEIGHT_SHARE``). ``measure_footprint`` measures both
    added              times per stage that features have, by name in the order of ``MEASURED_DEFAULTS``. Each is an
                       argument and an attribute by its own name (``feature_table.py``: ``measured``)
    links              (source rank, target rank, time) of links that differ from ``transfer``
    microbatches       what each microbatch takes of the times; without it all take the same

    Raises PlanError for negative or non-finite times, and for lists whose length is not that of the pipeline.
    """

    forward: float | tuple[float, ...] = 1.0
    backward_input: float | tuple[float, ...] = 1.0
    weight: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] | None = None
    transfer: float = 0.0
    memory_limit: float | tuple[float, ...] | None = None
    activation: float | tuple[float, ...] = 1.0
    weight_activation: float | tuple[float, ...] | None = None
    added: Settings = ()
    links: tuple[tuple[int, int, float], ...] | None = None
    microbatches: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name, default in _defaults().items():
            value = getattr(self, name)
            if name == "links" and value is not None:
                object.__setattr__(self, "links", _rows("links", value, 3))
                continue
            if isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
                if name not in MEASURED_DEFAULTS:
                    object.__setattr__(self, name, value)
            for number in value if isinstance(value, tuple) and name != "transfer" else (value,):
                _check_number(name, number, default is None)
        tuples = ((name, tuple(value) if isinstance(value, list) else value) for name, value in self.added)
        object.__setattr__(self, "added", tuple(tuples))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """From what a JSON file holds, under the names above. Raises PlanError for a name that is not one of them."""
        _check_names("measured values", values, [*_defaults()])
        return cls(**values)

    def taking(self, costs: StageCosts, **others: Any) -> Measured:
        """With the times of ``costs``, and other fields as given."""
        times = {name: getattr(costs, name) for name in ("forward", "backward_input", "weight", "backward")}
        return replace(self, **times, **others)

    def in_parts(self) -> tuple[Measured, float]:
        """The same times in whole parts of the longest time, and the longest time. Then times that are given in other
        units are equal to the bit, and so are their sums, which are exact. Choices between equal times do not depend
        on the unit."""
        times = (number for name in _TIMES for number in _numbers(getattr(self, name)))
        unit = max(times, default=0.0)
        if not unit:
            return self, 1.0
        scaled: dict[str, Any] = {name: _in_parts(getattr(self, name), unit) for name in _TIMES}
        if self.links is not None:
            scaled["links"] = tuple((source, target, _in_parts(time, unit)) for source, target, time in self.links)
        return replace(self, **scaled), unit

    def costs(self, num_stages: int) -> StageCosts:
        """Times per stage."""
        backward = None if self.backward is None else self._each("backward", num_stages)
        forward, inputs, weight = (self._each(name, num_stages) for name in ("forward", "backward_input", "weight"))
        costs = StageCosts.per_stage(forward, inputs, weight, backward)
        others: dict[str, Any] = {name: self._each(name, num_stages) for name, _ in self.added}
        return replace(costs, microbatches=self.microbatches or (), **others)

    def network(self) -> Network:
        """A link takes ``transfer``, or as ``links`` says, and any number of transfers at a time."""
        links = {edge: Link(latency=time) for edge, time in self.each_link.items()}
        return Network(link=Link(latency=self.transfer), links=links)

    @property
    def each_link(self) -> dict[tuple[int, int], float]:
        """The time of a transfer, by (source, target); only links that ``links`` lists."""
        return {(source, target): time for source, target, time in self.links or ()}

    def memory(self, placement: Placement) -> MemoryModel:
        """Memory per stage, and the limits per rank."""
        stages = placement.num_stages
        ranks = placement.pipeline_size
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


@dataclass(frozen=True)
class Units:
    """The units of a file's numbers: a key of MS, and one of GB. Raises PlanError for others."""

    time: str = "ms"
    memory: str = "GB"

    def __post_init__(self) -> None:
        for name, known in (("time", MS), ("memory", GB)):
            if getattr(self, name) not in known:
                raise PlanError(f"the unit of {name} is {getattr(self, name)!r}; it must be {' or '.join(known)}")


@dataclass(frozen=True)
class TransferTimes:
    """Transfers between ranks, one at a time on a link.

    message             size of the largest message between stages
    latency, bandwidth  time = latency + size / bandwidth, over all links; bandwidth None: all sizes take the same time
    transfers           [size, time], the median over all links
    links               [source, target, latency, bandwidth]; for both directions, unless both are listed
    """

    message: float = 0.0
    latency: float = 0.0
    bandwidth: float | None = None
    transfers: tuple[tuple[float, float], ...] = ()
    links: tuple[tuple[int, int, float, float | None], ...] = ()

    def __post_init__(self) -> None:
        for name in ("message", "latency", "bandwidth"):
            _check_number(name, getattr(self, name), name == "bandwidth")
        for name, width in (("transfers", 2), ("links", 4)):
            object.__setattr__(self, name, _rows(name, getattr(self, name), width))

    @property
    def link(self) -> Link:
        """The latency and bandwidth of every link."""
        return _link(self.latency, self.bandwidth)

    @property
    def each_link(self) -> dict[tuple[int, int], Link]:
        listed = {(source, target): _link(latency, bandwidth) for source, target, latency, bandwidth in self.links}
        return {(target, source): link for (source, target), link in listed.items()} | listed


@dataclass(frozen=True)
class CopyRates:
    """Memory per time of copies. ``between``: what is copied from and to, in words."""

    between: str = ""
    to_host: float = 0.0
    to_device: float = 0.0

    def __post_init__(self) -> None:
        for name in ("to_host", "to_device"):
            _check_number(name, getattr(self, name), False)


@dataclass(frozen=True)
class MeasuredStep:
    """The plan that ran during the measurement. Times are medians over ``steps`` training steps."""

    steps: int = 0
    schedule: str = ""
    pipeline_size: int = 0
    num_chunks: int = 1
    num_microbatches: int = 0
    micro_batch_size: int | None = None
    seq_length: int | None = None
    device: str = ""
    split_backward: bool = False

    def __post_init__(self) -> None:
        sizes = ("steps", "pipeline_size", "num_chunks", "num_microbatches", "micro_batch_size", "seq_length")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise PlanError(f"{name} of run is {value!r}; it must be a whole number of at least 0")


@dataclass(frozen=True)
class MeasuredFile:
    """The file that ``config.measure`` writes: the fields of a Measured, and sections that may be missing.

    units    of all numbers; without them times are in any one unit, and ``advise`` takes ms and GB
    network  transfers by size
    copies   between device and host
    run      what ran
    """

    values: Measured
    units: Units | None = None
    network: TransferTimes | None = None
    copies: CopyRates | None = None
    run: MeasuredStep | None = None

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> MeasuredFile:
        """Raises PlanError for names that are not known, and for numbers that cannot be."""
        own = [*_defaults()]
        _check_names("measured values", content, [*own, *_SECTIONS])
        sections = {name: _section(name, content[name]) for name in _SECTIONS if name in content}
        return cls(Measured.from_dict({name: content[name] for name in own if name in content}), **sections)

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file, without what was not measured."""
        sections = {name: asdict(part) for name in _SECTIONS if (part := getattr(self, name)) is not None}
        units = {"units": sections.pop("units")} if self.units else {}
        defaults = _defaults()
        known = {name: value for name, value in all_values(self.values).items() if value != defaults[name]}
        return {**units, **known, **sections}


def _defaults() -> dict[str, Any]:
    """The default of every value by name, values of features included."""
    own = {field.name: field.default for field in fields(Measured) if field.name not in ("added", *MEASURED_DEFAULTS)}
    return {**own, **MEASURED_DEFAULTS}


_TIMES = ("forward", "backward_input", "weight", "backward", "transfer", *MEASURED_DEFAULTS)
_PARTS = 2.0**40  # of the longest time: less than the error of any measurement, and sums of thousands are exact
LARGEST = 1e18  # of times and sizes, so that their products are finite
_SECTIONS: dict[str, type] = {"units": Units, "network": TransferTimes, "copies": CopyRates, "run": MeasuredStep}


def fitted_link(samples: Sequence[tuple[float, float]]) -> Link:
    """The link that fits these (size, time above 0) best: least squares of relative errors."""
    rows = [(1 / time**2, size, time) for size, time in samples]
    total = sum(w for w, _, _ in rows)
    size = sum(w * x for w, x, _ in rows) / total
    mean = sum(w * t for w, _, t in rows) / total
    spread = sum(w * (x - size) ** 2 for w, x, _ in rows)
    rise = sum(w * (x - size) * (t - mean) for w, x, t in rows)
    if rise <= 0 or spread <= 0:
        return Link(mean)
    latency = mean - rise / spread * size
    if latency >= 0:
        return Link(latency, spread / rise)
    return Link(0.0, sum(w * x * x for w, x, _ in rows) / sum(w * x * t for w, x, t in rows))  # through zero


def _numbers(value: float | tuple[float, ...] | None) -> tuple[float, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _in_parts(value: Any, unit: float) -> Any:
    """A number, a tuple of them, or None."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_in_parts(number, unit) for number in value)
    return round(value / unit * _PARTS) / _PARTS


def _link(latency: float, bandwidth: float | None) -> Link:
    return Link(latency, math.inf if bandwidth is None else bandwidth)


def _section(name: str, content: Any) -> Any:
    kind = _SECTIONS[name]
    if not isinstance(content, Mapping):
        raise PlanError(f"{name} is {content!r}; it must be an object")
    _check_names(f"values of {name}", content, [field.name for field in fields(kind)])
    return kind(**content)


def _rows(name: str, rows: Any, width: int) -> tuple[Any, ...]:
    lists = (list, tuple)
    if not isinstance(rows, lists) or any(not isinstance(row, lists) or len(row) != width for row in rows):
        raise PlanError(f"measured {name} are {rows!r}; they must be lists of {width} numbers")
    for number in chain.from_iterable(rows):
        _check_number(name, number, True)
    return tuple(map(tuple, rows))


def _check_names(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise PlanError(f"{what} {', '.join(unknown)} are not known; they are {', '.join(known)}")


def measured_values(given: Measured | Mapping[str, Any] | str | None) -> Measured | None:
    """``given``: a Measured, a dict of its fields (or of all that a MeasuredFile holds), or the path of a JSON file
    with such a dict, read once per process. Raises PlanError, FileFormatError for a file that cannot be read.
    """
    if isinstance(given, str):
        return _from_file(given)
    if isinstance(given, Mapping):
        return MeasuredFile.from_dict(given).values
    if given is not None and not isinstance(given, Measured):
        raise PlanError(f"{given!r} is no Measured, no dict of its fields and no path of a JSON file")
    return given


@lru_cache(maxsize=16)
def _from_file(path: str) -> Measured:
    text = read_text(path, plain=True)
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise PlanError("it holds no object with measured values by name")
        return MeasuredFile.from_dict(content).values
    except (ValueError, RecursionError) as error:  # PlanError is a ValueError
        raise FileFormatError(f"{path}: {error}") from error


def _check_number(name: str, value: Any, may_be_none: bool) -> None:
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
        lists = "" if name == "transfer" else ", or a list of them"
        raise PlanError(f"measured {name} is {value!r:.40}; it must be a number from 0 to {LARGEST:g}{lists}")

"""Compares the records of a layout with those of one process: they are equal, equal within rounding, or different.
Finds the first difference.

In float32, the layout may differ from one process in float64 by `FACTOR` times the difference of one process in
float32, because the layout rounds in another order. In float64, a difference of more than `FACTOR` x `FLOAT64` times
the largest value is a fault: rounding is about 1e-15.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron_pp.tools.parity.answers import norms
from megatron_pp.tools.parity.answers.verdicts import DIFFERENT, EQUAL, ROUNDING
from megatron_pp.tools.parity.records.parameters import part_of
from megatron_pp.tools.parity.records.recorder import (
    BACKWARD,
    GRADIENT,
    NORM,
    PARAMETER,
    REPORT,
    Key,
    Record,
    Value,
    is_state,
)

FACTOR = 32.0
FLOAT32 = 4 * float(np.finfo(np.float32).eps)
FLOAT64 = 1e-11
FAR_OFF = 1000 * FLOAT32
_SAME_RATIO = 1e-3


@dataclass
class Difference:
    """The comparison of one tensor on one rank.

    error    largest error against float64
    allowed  largest error that rounding can cause
    ratio    ratio to the right values, if all elements have the same ratio
    exact    equal to the last bit
    stage    stage of the pipeline, in model order, that has the parameter
    """

    key: Key
    rank: int
    error: float
    allowed: float
    ratio: float | None = None
    exact: bool = False
    stage: int | None = None

    @property
    def found(self) -> bool:
        return not self.error <= self.allowed


@dataclass
class Comparison:
    """The comparison of all tensors, in the order in which one process computes them.

    missing       sentences about values that no rank has
    partial_sums  parameter -> the kind of ranks whose gradients add up to the right one
    of_norm       if the first difference is a norm, the parameters whose squares are wrong in it
    """

    differences: list[Difference] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    partial_sums: dict[str, str] = field(default_factory=dict)
    of_norm: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.missing or any(one.found for one in self.differences):
            return DIFFERENT
        return EQUAL if all(one.exact for one in self.differences) else ROUNDING

    def exact_kinds(self) -> list[str]:
        """The kinds whose tensors are equal to the last bit in all steps."""
        kinds = dict.fromkeys(one.key.kind for one in self.differences)
        return [kind for kind in kinds if all(one.exact for one in self.differences if one.key.kind == kind)]

    def wrong(self) -> list[Difference]:
        return [one for one in self.differences if one.found]

    @property
    def first(self) -> Difference | None:
        return next(iter(self.wrong()), None)


def compare_records(records: list[Record], alone: Record, exact: Record, unit: float = FLOAT32) -> Comparison:
    """Compares ``records`` with ``alone``, one process in the same precision with rounding ``unit``. ``exact`` is one
    process in float64."""
    result = Comparison()
    noise = _noise(alone, exact, unit)
    held = _held(records)
    last = max((key.step for key in alone.values), default=0)
    for key, right in alone.values.items():
        parts = held.pop(key, [])
        allowed = noise[key.step, key.kind, key.name]
        truth = exact.values[key].data
        if not parts and _may_be_missing(key, last, records):
            continue
        if not parts:
            where = f", microbatch {key.microbatch}" if key.microbatch >= 0 else ""
            result.missing.append(f"no rank has the {key.kind} of {key.name}{where}")
            continue
        for rank, value in parts:
            found = _difference(key, rank, value, right.data, truth, allowed)
            found.stage = _stage(records[rank], key.name)
            result.differences.append(found)
        if key.kind == GRADIENT or is_state(key.kind):
            result.missing += _not_covered(key, [value for _, value in parts], truth.shape)
        if key.kind == GRADIENT and any(one.found for one in result.differences[-len(parts) :]):
            _find_partial_sums(result, key, parts, records, truth, allowed)
    first = result.first
    if first is not None and first.key.kind == NORM:
        reported = float(records[first.rank].values[first.key].data)
        result.of_norm = norms.concerned(first.key, reported, records, exact)
    result.missing += [f"one process has no parameter {name}" for one in records for name in one.unknown]
    return result


def _may_be_missing(key: Key, last: int, records: list[Record]) -> bool:
    """Whether it is no fault that no rank has the value. Hooks do not see gradients of recomputed outputs, parameters
    may not be gathered yet, reports are recorded only if each microbatch is whole on one rank, and optimizers keep
    different states."""
    place = records[0].place
    assert place is not None
    if key.kind == REPORT:
        return place.size["DP"] * place.size["CP"] > 1
    if key.kind == PARAMETER:
        return key.step < last
    return key.kind == BACKWARD or is_state(key.kind) or any(key.name in one.uncompared for one in records)


def same_bits(records: list[Record], others: list[Record]) -> bool:
    """Whether two runs of one layout recorded the same tensors with the same bits on each rank."""
    both = list(zip(records, others, strict=True))
    if any(one.values.keys() != other.values.keys() for one, other in both):
        return False
    pairs = ((value, other.values[key]) for one, other in both for key, value in one.values.items())
    return all(np.array_equal(_valid(a, a.data), _valid(b, b.data), equal_nan=True) for a, b in pairs)


def _stage(record: Record, name: str) -> int | None:
    """The stage that has the parameter. Chunk c of rank r is stage c x PP + r."""
    chunk = record.stage.get(name)
    place = record.place
    return None if chunk is None or place is None else chunk * place.size["PP"] + place.rank["PP"]


def _noise(alone: Record, exact: Record, unit: float) -> dict[tuple[int, str, str], float]:
    """(step, kind, name) -> the largest error that rounding can cause, over all microbatches. A tensor that is zero
    except for rounding, such as the gradient of a key's bias, is measured by the largest value of its kind."""
    noise: dict[tuple[int, str, str], float] = {}
    largest: dict[str, float] = {}
    for key, value in exact.values.items():
        largest[key.kind] = max(largest.get(key.kind, 0.0), float(np.abs(value.data).max(initial=0.0)))
    for key, value in alone.values.items():
        truth = exact.values[key].data
        error = float(np.abs(value.data - truth).max(initial=0.0))
        least = unit * max(float(np.abs(truth).max(initial=0.0)), 1e-3 * largest[key.kind])
        group = (key.step, key.kind, key.name)
        noise[group] = max(noise.get(group, 0.0), FACTOR * max(error, least))
    return noise


def _held(records: list[Record]) -> dict[Key, list[tuple[int, Value]]]:
    """Key -> (rank, value) of each rank that has it. Sums over the tokens of context-parallel ranks are added up."""
    held: dict[Key, list[tuple[int, Value]]] = {}
    sums: dict[tuple[Key, tuple[int, ...]], np.ndarray] = {}
    for rank, record in enumerate(records):
        assert record.place is not None
        for key, value in record.values.items():
            if value.sum_over_context and record.place.size["CP"] > 1:
                group = (
                    key,
                    tuple(number for name, number in record.place.rank.items() if name not in ("CP", "EP", "ETP")),
                )
                if group in sums:
                    sums[group] += value.data
                    continue
                value = Value(np.array(value.data))
                sums[group] = value.data
            held.setdefault(key, []).append((rank, value))
    return held


def _difference(key: Key, rank: int, value: Value, right: np.ndarray, truth: np.ndarray, allowed: float) -> Difference:
    own, right, truth = (
        _valid(value, x) for x in (value.data, part_of(right, value.indices), part_of(truth, value.indices))
    )
    if own.shape != truth.shape:
        return Difference(key, rank, float("inf"), allowed)
    allowed += value.resolution
    error = float(np.abs(own - truth).max(initial=0.0))
    error = error if np.isfinite(own).all() else float("inf")
    exact = bool(np.array_equal(own, right))
    ratio = _ratio(own, truth, allowed) if error > allowed and np.isfinite(error) else None
    return Difference(key, rank, error, allowed, ratio, exact)


def _valid(value: Value, array: np.ndarray) -> np.ndarray:
    return array if value.valid is None else array.reshape(-1)[slice(*value.valid)]


def _ratio(own: np.ndarray, truth: np.ndarray, allowed: float) -> float | None:
    """The number by which all elements of ``truth`` are multiplied in ``own``; None if there is no such number."""
    own, truth = own.astype(np.float64).reshape(-1), truth.astype(np.float64).reshape(-1)
    square = float(truth @ truth)
    if not square:
        return None
    ratio = float(own @ truth) / square
    left = float(np.abs(own - ratio * truth).max())
    return ratio if left <= max(allowed, _SAME_RATIO * float(np.abs(own).max())) else None


def _not_covered(key: Key, values: list[Value], shape: tuple[int, ...]) -> Iterator[str]:
    """A sentence if some elements of a parameter are on no rank, as after a wrong division among an optimizer's
    ranks."""
    covered = np.zeros(shape, dtype=bool)
    for value in values:
        own = np.zeros(value.data.size, dtype=bool)
        own[slice(*(value.valid or (0, own.size)))] = True
        positions = [value.indices.get(dim, np.arange(size)) for dim, size in enumerate(shape)]
        if shape:
            covered[np.ix_(*positions)] |= own.reshape(value.data.shape)
        else:
            covered |= own.all()
    if not covered.all():
        yield f"{int((~covered).sum())} elements of the {key.kind} of {key.name} are on no rank"


def _find_partial_sums(
    result: Comparison,
    key: Key,
    parts: list[tuple[int, Value]],
    records: list[Record],
    truth: np.ndarray,
    allowed: float,
) -> None:
    """Records the kind of group whose ranks have partial sums: their gradients add up to the right gradient."""
    for name in ("TP", "CP", "PP", "DP", "EP"):
        groups: dict[tuple[int, ...], list[Value]] = {}
        for rank, value in parts:
            place = records[rank].place
            assert place is not None
            if place.size[name] > 1 and value.valid is None:
                others = tuple(number for other, number in place.rank.items() if other not in (name, "ETP", "EP"))
                groups.setdefault(others, []).append(value)
        if groups and all(_adds_up(values, truth, allowed) for values in groups.values()):
            result.partial_sums[key.name] = name
            return


def _adds_up(values: list[Value], truth: np.ndarray, allowed: float) -> bool:
    first = values[0]
    if len(values) < 2 or any(value.data.shape != first.data.shape for value in values):
        return False
    if any(set(value.indices) != set(first.indices) for value in values):
        return False
    total = np.sum([value.data for value in values], axis=0, dtype=np.float64)
    return bool(np.abs(total - part_of(truth, first.indices)).max() <= len(values) * allowed)

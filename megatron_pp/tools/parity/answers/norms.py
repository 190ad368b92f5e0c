"""Finds the parameters whose gradients a wrong gradient norm leaves out or counts more than once."""

from __future__ import annotations

import re

import numpy as np

from megatron_pp.tools.parity.records.parameters import part_of
from megatron_pp.tools.parity.records.recorder import GRADIENT, Key, Record

_CLOSE = 1e-3


def concerned(key: Key, reported: float, records: list[Record], exact: Record) -> list[str]:
    """The parameters whose squares explain the difference of ``reported`` from the norm ``key`` of one process.

    They are the same parameters in all layers, with all their elements, or with the elements of all tensor-parallel
    ranks but the first. The list is empty if no parameters explain the difference.
    """
    off = abs(reported**2 - float(exact.values[key].data) ** 2)
    whole, behind = _squares(key.step, records, exact)
    explained = [
        kind for kind in whole for part in (whole[kind], behind[kind]) if part and abs(off - part) < _CLOSE * off
    ]
    return [
        one.name
        for one in exact.values
        if one.kind == GRADIENT and one.step == key.step and _kind(one.name) in explained
    ]


def _squares(step: int, records: list[Record], exact: Record) -> tuple[dict[str, float], dict[str, float]]:
    """By kind of parameter: the sum of squares of all elements, and of the elements that are not on the first
    tensor-parallel rank."""
    whole: dict[str, float] = {}
    behind: dict[str, float] = {}
    for key, value in exact.values.items():
        if key.kind != GRADIENT or key.step != step:
            continue
        kind = _kind(key.name)
        truth = value.data
        whole[kind] = whole.get(kind, 0.0) + float(np.sum(truth**2))
        behind.setdefault(kind, 0.0)
        parts = {}
        for record in records:
            own = record.values.get(key)
            if own is not None and own.indices and record.place is not None and record.place.rank["TP"] > 0:
                parts[record.place.rank["TP"]] = float(np.sum(part_of(truth, own.indices) ** 2))
        behind[kind] += sum(parts.values())
    return whole, behind


def _kind(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)

"""Reads the numbers in the line that Megatron's training loop logs after a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_FIELD = re.compile(r"([A-Za-z][^|:]*): +([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))(?= *\|)", re.IGNORECASE)
_OF_TIME = ("elapsed", "throughput", "energy", "power", "tokens/s", "tokens per sec", "memory")


@dataclass(frozen=True)
class Logged:
    """A logged number. ``resolution`` is one unit of its last digit."""

    name: str
    value: float
    resolution: float


def numbers_of(line: str) -> Iterator[Logged]:
    """The numbers in a line such as "iteration 1/ 9 | lm loss: 4.85E+00 |", except times."""
    for name, text in _FIELD.findall(line):
        if not any(word in name.lower() for word in _OF_TIME):
            yield Logged(name.strip(), float(text), _resolution(text))


def why_stale(name: str, chunks: Iterable[Any]) -> str:
    """The reason if a number cannot be compared because it is about the parameters before the step; "" if it can be
    compared. With bf16, which runs here in float32, Megatron uses the optimizer's own values."""
    gathers = any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks)
    if name != "params norm" or not gathers:
        return ""
    return "params norm, which Megatron logs before --overlap-param-gather has gathered parameters in float32"


def _resolution(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - digits) if digits else 0.0

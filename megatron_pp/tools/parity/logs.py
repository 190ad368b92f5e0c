"""The line that Megatron's training loop logs after a step, read back into numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_FIELD = re.compile(r"([A-Za-z][^|:]*): +([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))(?= *\|)", re.IGNORECASE)
_OF_TIME = ("elapsed", "throughput", "energy", "power", "tokens/s", "tokens per sec", "memory")


@dataclass(frozen=True)
class Logged:
    """A number as it is logged; ``resolution``: one unit of its last digit."""

    name: str
    value: float
    resolution: float


def numbers_of(line: str) -> Iterator[Logged]:
    """Of one line such as "iteration 1/ 9 | lm loss: 4.85E+00 |", without times."""
    for name, text in _FIELD.findall(line):
        if not any(word in name.lower() for word in _OF_TIME):
            yield Logged(name.strip(), float(text), _resolution(text))


def why_stale(name: str, chunks: Iterable[Any]) -> str:
    """Why a number cannot be compared, as it is of parameters from before the step; "" where it can. With bf16, which
    runs here in float32, Megatron takes the optimizer's own values."""
    gathers = any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks)
    if name != "params norm" or not gathers:
        return ""
    return "params norm, which Megatron logs before --overlap-param-gather has gathered parameters in float32"


def _resolution(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    digits = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - digits) if digits else 0.0

"""Chooses how much of a sweep runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import TypeVar

from testkit import autograd_draw

Case = TypeVar("Case")

EXHAUSTIVE = os.environ.get("MEGATRON_PP_EXHAUSTIVE", "") == "1"
"""Whether whole sweeps run, for hours, instead of parts that cover every pair of choices."""


def drawn(cases: Iterable[Case], most: int) -> list[Case]:
    """``most`` of the cases, in order, or all if whole sweeps run. The seed that draws tests for autograd's thread also
    draws the cases, so that each run of ``.ci/run`` has other ones."""
    every = list(cases)
    if EXHAUSTIVE:
        return every
    seed = autograd_draw.said()
    places = sorted(range(len(every)), key=lambda k: hashlib.sha256(f"{seed} {every[k]}".encode()).digest())
    return [every[k] for k in sorted(places[:most])]

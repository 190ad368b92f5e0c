"""How much of a sweep runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import TypeVar

from testkit import autograd_draw

Case = TypeVar("Case")

EXHAUSTIVE = os.environ.get("MEGATRON_PP_EXHAUSTIVE", "") == "1"
"""Whether sweeps run whole, for hours, and not the parts that cover every pair of choices."""


def drawn(cases: Iterable[Case], most: int) -> list[Case]:
    """``most`` of the cases, in their order; all where sweeps run whole. The seed that draws tests for autograd's
    thread draws these too, so that each run of ``.ci/run`` has others."""
    every = list(cases)
    if EXHAUSTIVE:
        return every
    seed = autograd_draw.said()
    places = sorted(range(len(every)), key=lambda k: hashlib.sha256(f"{seed} {every[k]}".encode()).digest())
    return [every[k] for k in sorted(places[:most])]

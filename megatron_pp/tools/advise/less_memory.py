"""Smaller memory limits for which a search also plans.

The search and the choice of recomputed layers are heuristics. Under a smaller limit they may find a shorter step than
under a larger limit. The plan for the smaller limit fits the larger limit, too. The answer for more memory must not be
slower, so the search also tries smaller limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_pp.errors import PlanError
from megatron_pp.tools.advise.candidates import Candidate, cut_model
from megatron_pp.tools.advise.evaluate import least_step
from megatron_pp.tools.advise.fit import Fitted, with_recomputed
from megatron_pp.tools.advise.question import Question

_DIGITS = 2  # significant digits of the limits, as users give them: 6.3 or 80 GB
_MOST = 10  # number of limits that are tried for a candidate


@dataclass(frozen=True, eq=False)
class Smaller:
    """A search with a smaller memory limit: the candidate, the model on its stages, and a lower bound of its step in
    ms."""

    candidate: Candidate
    cut: Fitted
    bound: float


def smaller_searches(question: Question, candidate: Candidate) -> Iterator[Smaller]:
    """``candidate``, a search, under the next limits below its own that are two-digit numbers of GB."""
    memory = question.memory * candidate.memory_share
    for _ in range(_MOST):
        memory = limit_below(memory)
        one = replace(candidate, memory_share=memory / question.memory)
        model = one.model(question)
        try:
            cut = cut_model(replace(question, memory=memory), one, model)
        except PlanError:
            return
        plain = with_recomputed(cut, (0,) * len(cut.stages))
        bound = min(least_step(question, one, model, each) for each in {plain, cut})
        if bound == math.inf:
            return
        yield Smaller(one, cut, bound)


def limit_below(memory: float) -> float:
    """The next number of two digits below ``memory``."""
    step = 10.0 ** (math.floor(math.log10(memory)) - _DIGITS + 1)
    below = (math.ceil(memory / step * (1 - 1e-9)) - 1) * step
    if below < 10.0 ** math.floor(math.log10(memory)) * (1 - 1e-9):  # below 10 of 10.2: 9.9
        below = 10.0 ** math.floor(math.log10(memory)) - step / 10
    return float(f"{below:.{_DIGITS}g}")

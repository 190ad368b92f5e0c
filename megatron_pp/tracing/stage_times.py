"""How long the compute operations of each stage took, over any number of recorded steps, and the costs of all stages.

Pure Python, as a recorded run is read without torch. ``megatron_pp.runtime.measuring`` gathers the times of all ranks.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from megatron_pp.plan.costs import StageCosts
from megatron_pp.plan.instruction import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    OUTPUT_S,
    OUTPUT_T,
    WEIGHT_GRAD,
    Instruction,
)

TIMED = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, OUTPUT_S, OUTPUT_T)
Operation = tuple[str, int]
"""One of TIMED, and a stage."""


class StageTimes:
    """Times of operations, in the unit in which they are added."""

    def __init__(self) -> None:
        self._times: defaultdict[Operation, list[float]] = defaultdict(list)
        self._disturbed: defaultdict[Operation, list[float]] = defaultdict(list)

    def add(
        self,
        program: Sequence[Instruction],
        starts: Sequence[float],
        ends: Sequence[float],
        disturbed: Callable[[Instruction], bool] | None = None,
    ) -> None:
        """One rank's step: when each of ``program`` (``Plan.timed``) began and ended. Operations that were
        ``disturbed`` count where there are no others.
        """
        for at, start, end in zip(program, starts, ends, strict=True):
            if at.op in TIMED:
                kept = self._disturbed if disturbed is not None and disturbed(at) else self._times
                kept[(at.op, at.stage)].append(end - start)

    def medians(self) -> dict[Operation, float]:
        return {at: statistics.median(times) for at, times in {**self._disturbed, **self._times}.items()}


def stage_costs(medians: Mapping[Operation, float], num_stages: int, slices: int = 1) -> StageCosts:
    """The costs of whole sequences, from median times of one slice of ``slices``; 0 for what did not run.

    Whole backwards count as two equal halves; where they ran in halves, a whole one as their sum.
    """

    def of(op: str) -> list[float]:
        return [slices * medians.get((op, stage), 0.0) for stage in range(num_stages)]

    whole, halves, weight = of(BACKWARD), of(INPUT_GRAD), of(WEIGHT_GRAD)
    for s, (both, one, other) in enumerate(zip(whole, halves, weight, strict=True)):
        if one == other == 0:
            halves[s] = weight[s] = both / 2
        elif both == 0:
            whole[s] = one + other
    passes = statistics.mean(of(OUTPUT_S)), statistics.mean(of(OUTPUT_T))
    return StageCosts(tuple(of(FORWARD)), tuple(whole), tuple(halves), tuple(weight), passes=passes)

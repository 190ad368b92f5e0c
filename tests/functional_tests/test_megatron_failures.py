"""If a rank fails after the schedule of a Megatron step, all other ranks soon raise an error with its number. The same
for a V placement, and there in the step too."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from typing import Any

import pytest

from testkit.sweeps import EXHAUSTIVE, drawn
from tests.functional_tests.megatron_failures import DEADLINE, PATIENCE, RANKS, Failure
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = [needs_megatron, pytest.mark.slow]

PLACES, FAULTS, STORES = (
    ("finalize", "optimizer", "between"),
    ("raise", "exit", "os_exit", "kill", "stop"),
    ("file", "rank 0"),
)
ALL = [
    Failure(place, how, (i + j // 2 + k) % RANKS, store, (i + j) % 2)
    for i, place in enumerate(PLACES)
    for j, how in enumerate(FAULTS)
    for k, store in enumerate(STORES)
]
# Every place with every fault; kinds of stores and metrics of every step alternate. Rank 0 has the store.
HALF = ALL if EXHAUSTIVE else [case for k, case in enumerate(ALL) if k % 2 == (k // 2) % 2]
assert {(one.victim, one.store) for one in HALF} == {(v, store) for v in range(RANKS) for store in STORES}

# Of steps whose stages are in a V. A run draws a fault of each group.
SCHEDULES = ("zb_v", "v_half", "v_min", "1f1b_v", "dualpipe_v")
CALLS = ("again", "never", "count", "length", "schedule")
GROUPS = (
    [("forward", "shape"), *product(("forward", "backward"), FAULTS)],
    [*product(("loss", "reports"), FAULTS)],
    [*product(("evaluation",), FAULTS)],
    [*product(("call",), CALLS)],
    [*product(PLACES, FAULTS)],
)


def in_v(place: str, how: str, number: int) -> Failure:
    """The ``number``-th case of a fault. Its rank, chunk and microbatch are some that have the place."""
    pipeline, chunk = (2, 4)[number % 2], number // 2 % 2
    victim = number // 2 % RANKS
    replicas = RANKS // pipeline
    if place == "loss":  # of the last stage, on the first rank of a pipeline
        victim, chunk = victim % replicas, 1
    elif place == "reports":  # of the first and the last rank of a pipeline
        victim = victim if pipeline == 2 else (0, RANKS - 1)[victim % 2]
    elif how == "shape" and victim < replicas:  # what the last stage makes is not sent
        chunk = 0
    schedule, microbatch = SCHEDULES[number % len(SCHEDULES)], number % (2 * pipeline)
    return Failure(place, how, victim, STORES[number // 3 % 2], number % 2, schedule, pipeline, chunk, microbatch)


V_CASES = [[in_v(*fault, 7 * k + number) for k, fault in enumerate(group) for number in range(8)] for group in GROUPS]
# A run draws three faults at each place.
CASES = [case for place in PLACES for case in drawn([one for one in HALF if one.place == place], 3)]
CASES += [case for group in V_CASES for case in drawn(group, 1)]
SECONDS = PATIENCE + 12.0  # silence, the abort of other groups, and the time for which a rank looks for the cause


@pytest.fixture(scope="module")
def found() -> list[list[Any]]:
    """Return the ranks' results of each case."""
    program = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.functional_tests.megatron_failures",
        json.dumps([asdict(case) for case in CASES]),
    ]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60 + DEADLINE * len(CASES), check=True)
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]


def name_of(case: Failure) -> str:
    place = f"{case.schedule}-P{case.pipeline}-{case.chunk}.{case.mb}" if case.schedule else "1f1b"
    return "-".join(map(str, (case.place, case.how, case.victim, case.store, case.metrics, place)))


def named_after(case: Failure) -> str:
    """How the errors of other ranks name the failed rank."""
    if case.how == "again":  # the others, which are in other work: their loop may come to this call late
        return "has not entered step"
    if case.pipeline == RANKS:
        return f"rank {case.victim}"
    if case.place == "call" and case.how != "never":  # they disagree
        first = case.victim % case.pipeline
        return f"(global rank {first}, {first + case.pipeline})"
    return f"global rank {case.victim}"


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(name_of, CASES))
def test_every_other_rank_names_the_failed_rank(number: int, found: list[list[Any]]) -> None:
    case = CASES[number]
    names = named_after(case)
    for rank, said in enumerate(found[number]):
        if rank == case.victim:
            own = {"raise": "ValueError: injected fault", "exit": "SystemExit: 3"}
            if case.how in FAULTS:
                assert (None if said is None else said[0]) == own.get(case.how), case
            continue
        assert said is not None, f"rank {rank} ended without a word"
        error, seconds, _ = said
        assert error.startswith(("PipelinePeerError", "PipelineStallError", "PipelineMismatchError")), (rank, error)
        assert names in error, f"rank {rank}, {case}: {error}"
        assert seconds < SECONDS

"""If a rank fails after the schedule of a Megatron step, all other ranks soon raise an error with its number."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from testkit.sweeps import EXHAUSTIVE, drawn
from tests.functional_tests.megatron_failures import DEADLINE, PATIENCE, RANKS
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = [needs_megatron, pytest.mark.slow]

PLACES, FAULTS, STORES = (
    ("finalize", "optimizer", "between"),
    ("raise", "exit", "os_exit", "kill", "stop"),
    ("file", "rank 0"),
)
ALL = [
    (place, how, (i + j // 2 + k) % RANKS, store, (i + j) % 2)
    for i, place in enumerate(PLACES)
    for j, how in enumerate(FAULTS)
    for k, store in enumerate(STORES)
]
# Every place with every fault; kinds of stores and metrics of every step alternate. Rank 0 has the store.
HALF = ALL if EXHAUSTIVE else [case for k, case in enumerate(ALL) if k % 2 == (k // 2) % 2]
assert {(victim, store) for _, _, victim, store, _ in HALF} == {(v, store) for v in range(RANKS) for store in STORES}
# A run draws three faults at each place.
CASES = [case for place in PLACES for case in drawn([one for one in HALF if one[0] == place], 3)]
SECONDS = PATIENCE + 12.0  # silence, the abort of other groups, and the time for which a rank looks for the cause


@pytest.fixture(scope="module")
def found() -> list[list[Any]]:
    """Return the ranks' results of each case."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.functional_tests.megatron_failures", json.dumps(CASES)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60 + DEADLINE * len(CASES), check=True)
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_every_other_rank_names_the_failed_rank(number: int, found: list[list[Any]]) -> None:
    place, how, victim, store, _ = CASES[number]
    for rank, said in enumerate(found[number]):
        if rank == victim:
            own = {"raise": "ValueError: injected fault", "exit": "SystemExit: 3"}
            assert (None if said is None else said[0]) == own.get(how), place
            continue
        assert said is not None, f"rank {rank} ended without a word"
        error, seconds, _ = said
        assert error.startswith(("PipelinePeerError", "PipelineStallError")), f"rank {rank}: {error}"
        assert f"global rank {victim}" in error, f"rank {rank}, {store}: {error}"
        assert seconds < SECONDS

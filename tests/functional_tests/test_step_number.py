"""Real processes, one of which calls the step once too often: an error on every rank that names both numbers, and no
wrong numbers before it. Ranks that count alike are never disturbed."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from megatron_pp.errors import PipelineMismatchError
from megatron_pp.runtime.communicators import close_communicators, communicator_for
from megatron_pp.testing.pipeline import run_rank
from megatron_pp.testing.toy import ToyData, reference_run, toy_config
from tests.harness.processes import run_processes

SIZE = 3
STEPS = 8
ODD_STEP = 5


class Case(NamedTuple):
    """``odd_one`` calls ODD_STEP twice; all evaluate after every second step, and ``twice`` call each step twice."""

    odd_one: int | None
    evaluate: bool = False
    twice: bool = False


CASES = {
    "first": Case(0),
    "middle": Case(1, evaluate=True),
    "last": Case(2, evaluate=True),
    "agreed before": Case(0, twice=True),
    "nobody": Case(None, evaluate=True),
}


class Seen(NamedTuple):
    finished: list[int]
    wrong: list[int]
    error: tuple[str, dict[int, str], str] | None


def _calls(case: Case, rank: int) -> list[tuple[int, bool]]:
    calls = []
    for number in range(1, STEPS + 1):
        times = 1 + case.twice + (rank == case.odd_one and number == ODD_STEP)
        calls += [(number, False)] * times + [(number, True)] * (case.evaluate and number % 2 == 0)
    return calls


def _optimizer_step(rank: int) -> None:
    """A rank's own failure between steps, which its program deals with, is nobody else's."""
    with contextlib.suppress(FloatingPointError):
        if rank == 1:
            raise FloatingPointError


def _run(rank: int, size: int, case: Case) -> Seen:
    number = 0
    # Two communicators on one group, as Megatron's training and evaluation may have.
    group = dist.new_group(list(range(size)))
    configs = [toy_config(step_number=lambda: number, overlap_p2p_comm=overlap) for overlap in (False, True)]
    finished: list[int] = []
    wrong: list[int] = []
    try:
        for number, forward_only in _calls(case, rank):
            config, data = configs[forward_only], ToyData(4, first=100 * number)
            communicator = communicator_for(group, config)
            result = run_rank(rank, size, 1, data, config, communicator, forward_only=forward_only)
            if result.losses and result.losses != reference_run(size, data).losses:
                wrong.append(number)
            finished.append(number)
            _optimizer_step(rank)
    except PipelineMismatchError as error:
        return Seen(finished, wrong, (error.field, error.values, str(error)))
    return Seen(finished, wrong, None)


def rank_main(rank: int, size: int) -> dict[str, Seen]:
    seen = {name: _run(rank, size, case) for name, case in CASES.items()}
    close_communicators()
    return seen


@pytest.fixture(scope="module")
def per_rank() -> list[dict[str, Seen]]:
    return run_processes(rank_main, SIZE, timeout=60.0, start_method="forkserver")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.odd_one is not None])
def test_every_rank_learns_which_numbers_met(per_rank: list[dict[str, Seen]], name: str) -> None:
    case = CASES[name]
    for seen in (of[name] for of in per_rank):
        assert seen.wrong == []
        assert seen.finished[-1] == ODD_STEP, seen
        assert seen.finished.count(ODD_STEP) == 1 + case.twice
        assert seen.error is not None
        field, values, text = seen.error
        assert field == "step_number"
        assert values[case.odd_one] == f"{ODD_STEP} (as in its last step)"
        assert f"{ODD_STEP + 1} (+1 since its last step)" in values.values()
        assert f"rank {case.odd_one} has {ODD_STEP}" in text


def test_ranks_that_count_alike_are_not_disturbed(per_rank: list[dict[str, Any]]) -> None:
    calls = [number for number, _ in _calls(CASES["nobody"], 0)]
    assert [of["nobody"] for of in per_rank] == [Seen(calls, [], None)] * SIZE

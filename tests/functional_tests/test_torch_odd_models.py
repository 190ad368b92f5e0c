"""Odd models in torch's stages, under each schedule that splits backwards: losses, all gradients, buffers and counts of
calls are those of one process.

Two steps with an evaluation between them, without zero_grad: the second step adds to the gradients of the first. All
quick cases share one start of two processes.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from megatron_pp.integrations.torch_pipelining import PlanSchedule
from megatron_pp.plan.builder import stage_numbers
from megatron_pp.plan.orders import SCHEDULES
from tests.functional_tests import torch_odd_models as models
from tests.harness.processes import run_processes
from tests.harness.sweeps import EXHAUSTIVE

RANKS = 2
MICROBATCHES = 4
SPLITTING = sorted(name for name, family in SCHEDULES.items() if family.splits_weight and not family.barriers)
WHOLE = ("1f1b", "interleaved_1f1b")


def _differences(rank: int, schedule: str, case: models.Case) -> list[str]:
    """What differs from one process on this rank, in words."""
    chunks = SCHEDULES[schedule].chunks or 2
    count, numbers = RANKS * chunks, stage_numbers(schedule, RANKS, chunks)[rank]
    every, whole = models.stages_of(case, count), models.OneProcess(case, count, MICROBATCHES)
    given: list[Any] = every
    if case.compiles:
        with models.compiling():
            given = [torch.compile(stage, backend="eager") for stage in every]
    stages = [PipelineStage(given[k], k, count, torch.device("cpu")) for k in numbers]
    ours = PlanSchedule(stages, MICROBATCHES, models.loss_fn, schedule=schedule)
    found: list[str] = []
    for number, trains in enumerate((True, False, True)):
        if trains and case.before is not None:
            case.before(number // 2, every)
            case.before(number // 2, whole.stages)
        expected = whole.run(number, trains)
        x, target = models.batch(number, MICROBATCHES)
        losses: list[Any] = []
        run = ours.step if trains else ours.eval
        run(*((x,) if 0 in numbers else ()), target=target if count - 1 in numbers else None, losses=losses)
        if losses:
            found += [f"run {number}: {text}" for text in _compared(_named(losses), _named(expected), case.rounds)]
        for k in numbers:
            one, other = models.state_of(every[k]), models.state_of(whole.stages[k])
            found += [f"run {number}: stage {k}: {text}" for text in _compared(one, other, case.rounds)]
    return found[:5]


def _named(losses: list[Any]) -> dict[str, Any]:
    return {f"loss {k}": loss for k, loss in enumerate(losses)}


def _compared(found: dict[str, Any], expected: dict[str, Any], rounds: bool) -> list[str]:
    texts = [f"{name} only on one side" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        if one is None or other is None:
            if one is not other:
                texts.append(f"{name} is {one}, in one process {other}")
        elif not (torch.allclose(one, other, rtol=1e-5, atol=1e-6) if rounds else torch.equal(one, other)):
            texts.append(f"{name} differs by {(one - other).abs().max()}")
    return texts


def _rank_main(rank: int, size: int, drawn: list[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    warnings.simplefilter("ignore")
    logging.getLogger("megatron_pp").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    cases = {**models.CASES, **models.COMPILED}
    return {(schedule, name): _differences(rank, schedule, cases[name]) for schedule, name in drawn}


EVERY = (*SPLITTING, *WHOLE)
PARTS = 1 if EXHAUSTIVE else 4  # each schedule runs one model of so many, each model runs under one schedule of so many
QUICK = [
    (schedule, name)
    for k, schedule in enumerate(EVERY)
    for i, name in enumerate(models.CASES)
    if (k + i) % PARTS == 0 or schedule == "zb_v"
]
COMPILED = [(schedule, name) for schedule in ("zb_h1", "1f1b") for name in models.COMPILED]


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, str], list[str]]]:
    return run_processes(_rank_main, RANKS, (QUICK,), timeout=400, start_method="mixed")


@pytest.mark.parametrize("schedule", EVERY)
def test_losses_and_gradients_of_odd_models_are_those_of_one_process(results: list[Any], schedule: str) -> None:
    for of_rank in results:
        assert {key: texts for key, texts in of_rank.items() if key[0] == schedule and texts} == {}


def test_so_they_are_where_a_part_is_compiled() -> None:
    results = run_processes(_rank_main, RANKS, (COMPILED,), timeout=200, start_method="mixed")
    assert [{key: texts for key, texts in of_rank.items() if texts} for of_rank in results] == [{}] * RANKS

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

from megatron_pp.plan.orders import SCHEDULES
from testkit.processes import run_processes
from testkit.sweeps import EXHAUSTIVE, drawn
from tests.functional_tests import torch_odd_models as models

SPLITTING = sorted(name for name, family in SCHEDULES.items() if family.splits_weight and not family.barriers)
WHOLE = ("1f1b", "interleaved_1f1b")


def _rank_main(rank: int, size: int, drawn: list[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    warnings.simplefilter("ignore")
    logging.getLogger("megatron_pp").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    cases = {**models.CASES, **models.COMPILED}
    return {(schedule, name): models.differences(rank, schedule, cases[name]) for schedule, name in drawn}


EVERY = (*SPLITTING, *WHOLE)
PARTS = 1 if EXHAUSTIVE else 6  # each schedule runs one model of so many, each model runs under one schedule of so many
(FIRST,) = drawn(range(PARTS), 1)
QUICK = [
    (schedule, name)
    for k, schedule in enumerate(EVERY)
    for i, name in enumerate(models.CASES)
    if (k + i) % PARTS == FIRST or schedule == "zb_v"
]
COMPILED = [(schedule, name) for schedule in ("zb_h1", "1f1b") for name in models.COMPILED]


@pytest.fixture(scope="module")
def results() -> list[dict[tuple[str, str], list[str]]]:
    return run_processes(_rank_main, models.RANKS, (QUICK,), timeout=400, start_method="mixed")


@pytest.mark.parametrize("schedule", EVERY)
def test_losses_and_gradients_of_odd_models_are_those_of_one_process(results: list[Any], schedule: str) -> None:
    for of_rank in results:
        assert {key: texts for key, texts in of_rank.items() if key[0] == schedule and texts} == {}


def test_so_they_are_where_a_part_is_compiled() -> None:
    results = run_processes(_rank_main, models.RANKS, (COMPILED,), timeout=200, start_method="mixed")
    assert [{key: texts for key, texts in of_rank.items() if texts} for of_rank in results] == [{}] * models.RANKS

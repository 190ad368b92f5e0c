"""torch's stages in ``fully_shard`` (FSDP2) under our plans have the numbers of one process, and the bits of torch's
own runtime with FSDP2.

The rows are in ``numbers/torch_stages.py`` and ``numbers/torch_runtime.py``. A run draws the schedule that torch's
runtime runs too, two of torch's schedules with whole and two with split backwards, one of two schedules with nested
modules, half of the unusual models that FSDP2 can shard, and a row on pipelines of four ranks. Nested modules, mixed
precision and stages of one replica run in each run.
"""

from __future__ import annotations

import pytest

from testkit.sweeps import drawn
from tests.functional_tests.numbers import torch_runtime, torch_stages
from tests.functional_tests.numbers.rows import Compared, asked, assert_equal, run_rows

RUNTIME = [*drawn(torch_runtime.SHARDED, 1), *torch_runtime.PRECISION]
STAGES = [name for most, rows in torch_stages.SHARDED for name in drawn(rows, most)]
ODD = torch_stages.in_turn(torch_stages.ODD_SHARDED, 2 * len(torch_stages.ODD_SHARDED))
LONGER = drawn(torch_stages.LONGER, 1)


# All rows on four ranks run in the same processes.
@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Compared]]:
    return run_rows(f"{torch_runtime.__name__}:ROWS", asked(request, [*RUNTIME, *STAGES, *ODD]), 4)


@pytest.fixture(scope="module")
def longer_results(request: pytest.FixtureRequest) -> dict[str, list[Compared]]:
    return run_rows(f"{torch_runtime.__name__}:ROWS", asked(request, LONGER), 8)


@pytest.mark.parametrize("name", RUNTIME)
def test_losses_outputs_and_gradients_are_torchs_to_the_last_bit(results: dict[str, list[Compared]], name: str) -> None:
    assert_equal(torch_runtime.ROWS[name], results[name])


@pytest.mark.parametrize("name", STAGES)
def test_numbers_are_those_of_one_process(results: dict[str, list[Compared]], name: str) -> None:
    assert_equal(torch_runtime.ROWS[name], results[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_numbers_of_odd_models_are_those_of_one_process(results: dict[str, list[Compared]], name: str) -> None:
    assert_equal(torch_runtime.ROWS[name], results[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_losses_and_gradients_equal_torchs_on_four_ranks(longer_results: dict[str, list[Compared]], name: str) -> None:
    assert_equal(torch_runtime.ROWS[name], longer_results[name])

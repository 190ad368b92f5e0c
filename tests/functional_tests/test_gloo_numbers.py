"""Real gloo processes: losses and gradients equal those of one process, to the last bit.

The rows are in ``numbers/library.py``. They cover the cases that ``unit_tests/runtime/test_differential.py`` runs over
the in-memory transport, and the cases that need real processes: torch's DistributedDataParallel and FSDP2 around
stages. A run draws one row of each schedule, one of each schedule with split backwards, and one of each kind of FSDP2's
collectives. It draws each row of 1F1B and interleaved 1F1B under two of the four policies, so that each policy has half
of them. All other rows run each time, such as those in which a well-known stack fails.
"""

from __future__ import annotations

import pytest
import torch

from testkit.sweeps import drawn
from tests.functional_tests.numbers import library
from tests.functional_tests.numbers.rows import Compared, Row, asked, assert_equal, differences, run_rows

TABLE = "tests.functional_tests.numbers.library:ROWS"
ROWS = library.of_this_run()
LONGER = drawn(library.LONGER, 2)


# All rows run in the same processes, on one worker.
@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Compared]]:
    return run_rows(TABLE, asked(request, ROWS), 4)


@pytest.mark.parametrize("name", ROWS)
def test_gloo_processes_give_the_numbers_of_one(results: dict[str, list[Compared]], name: str) -> None:
    assert_equal(library.ROWS[name], results[name])


@pytest.fixture(scope="module")
def longer_results(request: pytest.FixtureRequest) -> dict[str, list[Compared]]:
    return run_rows(TABLE, asked(request, LONGER), 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", LONGER)
def test_sharded_stages_of_longer_pipelines_give_the_numbers_of_one_process(
    longer_results: dict[str, list[Compared]], name: str
) -> None:
    """The memory of whole stages must be what the plan counts. Two rows are drawn."""
    assert_equal(library.ROWS[name], longer_results[name])


def test_the_comparison_sees_one_wrong_bit_and_what_is_missing() -> None:
    one = torch.ones(2)
    assert differences({"a": one, "b": None, "c": 0.5}, {"a": one.clone(), "b": None, "c": 0.5}) == []
    assert differences({"a": one}, {"a": one.nextafter(one + 1)}) != []
    for wrong in (one.double(), one[:1], None, torch.full((2,), torch.nan)):
        assert differences({"a": wrong}, {"a": one}) != []
        assert differences({"a": wrong}, {"a": one}, near=1e-3) != []
    assert differences({"a": one}, {}) == ["a was not expected"]
    assert differences({"a": one * 1.01}, {"a": one, "b": 100 * one}, near=1e-3) == []
    row = Row(lambda place: {}, lambda place: {}, size=2)
    with pytest.raises(AssertionError, match="no rank has b"):
        assert_equal(row, [Compared([], {"a"}, {"a", "b"}), Compared([], {"a"}, {"a", "b"})])
    with pytest.raises(AssertionError, match="rank 1: a differs"):
        assert_equal(row, [Compared([], {"a"}, {"a"}), Compared(["a differs"], {"a"}, {"a"})])

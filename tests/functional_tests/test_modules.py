"""Pipelines of several modules on gloo: losses and gradients equal to the last bit to one process."""

from __future__ import annotations

import pytest

from testkit.processes import run_processes
from tests.functional_tests.module_checks import a_rank_gives_no_dict, refused_arguments
from tests.functional_tests.numbers import several_modules
from tests.functional_tests.numbers.rows import Compared, asked, assert_equal, run_rows
from tests.functional_tests.numbers.several_modules import SETUPS


# All rows run in the same processes.
@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Compared]]:
    table = "tests.functional_tests.numbers.several_modules:ROWS"
    return run_rows(table, asked(request, several_modules.ROWS), several_modules.RANKS)


@pytest.mark.parametrize("name", several_modules.ROWS)
def test_losses_and_gradients_are_those_of_one_process(results: dict[str, list[Compared]], name: str) -> None:
    assert_equal(several_modules.ROWS[name], results[name])


def test_a_forgotten_output_is_an_error_on_all_ranks() -> None:
    setup = SETUPS["pipelines of unequal length"]
    errors = run_processes(a_rank_gives_no_dict, 5, (setup,), start_method="forkserver")
    assert errors[0].startswith("ScheduleInputError: forward_step_func gave a dict of other; on this rank it must give")
    assert all(error.startswith("PipelinePeerError") and "a dict of other" in error for error in errors[1:]), errors


def test_impossible_settings_are_refused_before_any_communication() -> None:
    (found, other) = run_processes(refused_arguments, 2, (SETUPS["an encoder"],), start_method="forkserver")
    assert found == other
    wanted = ("variable_seq_lengths=True", "no pipeline_schedule 'zb_h1'", "no p2p_channels 'shared'", "pipeline_dtype")
    assert all(words in line for words, line in zip(wanted, found, strict=True)), found

"""torch's pipeline stages under our plans have the numbers of one process and the bits of torch's own runtime, with
models of all kinds.

The rows are in ``numbers/torch_stages.py``, ``numbers/odd_models.py`` and ``numbers/torch_runtime.py``. Each run draws
some of them. In each run every unusual model runs under a schedule that splits backwards, every schedule runs, and each
of torch's schedules runs on two ranks. On four ranks, and with DistributedDataParallel, one schedule with whole and one
with split backwards runs.
"""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from torch.distributed.pipelining import schedules

from megatron_pp.errors import PlanError
from megatron_pp.integrations.torch_pipelining import PlanSchedule, get_schedule_class, use_in
from testkit.processes import run_processes
from testkit.sweeps import drawn
from tests.functional_tests.numbers import torch_runtime, torch_stages
from tests.functional_tests.numbers.rows import Compared, asked, assert_equal, run_rows

RUNTIME = [*torch_runtime.ALWAYS, *drawn(torch_runtime.OTHERS, 1)]
ODD = torch_stages.odd_of_this_run()
STAGES = [
    *torch_stages.ON_TWO,
    *(name for rows in (*torch_stages.ON_FOUR, *torch_stages.IN_DDP) for name in drawn(rows, 1)),
    *drawn(torch_stages.TABLES, 2),
    *drawn(torch_stages.PLANS, 1),
    *drawn(torch_stages.ORDERS, 1),
    *torch_runtime.TRACED,
]
ROWS = [*RUNTIME, *ODD, *torch_stages.SETTINGS, *STAGES, *torch_stages.ODD_COMPILED]


# All rows run in the same processes.
@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Compared]]:
    return run_rows(f"{torch_runtime.__name__}:ROWS", asked(request, ROWS), 4)


@pytest.mark.parametrize("name", RUNTIME)
def test_losses_outputs_and_gradients_are_torchs_to_the_last_bit(results: dict[str, list[Compared]], name: str) -> None:
    assert_equal(torch_runtime.ROWS[name], results[name])


@pytest.mark.parametrize("name", [*ODD, *torch_stages.SETTINGS, *torch_stages.ODD_COMPILED])
def test_numbers_of_odd_models_are_those_of_one_process(results: dict[str, list[Compared]], name: str) -> None:
    assert_equal(torch_runtime.ROWS[name], results[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_numbers_of_odd_models_are_those_of_one_process_under_torchs_schedule_tables_and_runtime(
    results: dict[str, list[Compared]], name: str
) -> None:
    """The rows have two and four ranks, DistributedDataParallel, torch's runtime with our plans and orders, and stages
    that torch traces."""
    assert_equal(torch_runtime.ROWS[name], results[name])


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return run_processes(torch_runtime.refusals, 2, timeout=120, start_method="mixed")


REFUSALS = {
    "a loop for a V": r"rank \d has the stages \d, \d; zb_v on 2 ranks with 2 stage\(s\) each places stages in a V",
    "a V for a loop": r"interleaved_1f1b on 2 ranks with 2 stage\(s\) each places stages in a loop, here",
    "one stage twice": r"rank \d has the stages (\d), \1",
    "a stage is missing": r"rank \d has 1 of 4 stages; 1f1b on 2 ranks with 1 stage\(s\) each has 2",
    "one chunk for a V": r"schedule zb_v has 2 model chunk\(s\) a rank, not 1",
    "no stages": "stages is an empty list",
    "no microbatches": "n_microbatches",
    "unknown schedule": "1f2b",
    "arg_mbs of 3": "Expecting 4 arg_mbs but got 3",
    "arg_mbs of tensors": r"TypeError: arg_mbs\[0\] is a <class 'torch.Tensor'>; arg_mbs is a list of tuples",
    "both": "a positional argument was given whole",
    "a batch of 3": "the batch has samples for 3 microbatches, and the schedule has 4",
    "losses": "TypeError: losses must be a list",
    "no gradients": r"RuntimeError: .*call eval\(\)",
    "a batch of 3 on one rank": r"^ScheduleInputError: (pipeline rank 0 cannot .*: )?the batch has samples",
    "no target": r"^ScheduleInputError: (pipeline rank \d cannot begin the step: .*)?this rank has the last stage",
}


@pytest.mark.parametrize("misuse", REFUSALS)
def test_misuse_is_refused_on_every_rank_before_anything_is_sent(refusals: list[dict[str, str]], misuse: str) -> None:
    for of_rank in refusals:
        assert re.search(REFUSALS[misuse], of_rank[misuse])


def test_classes_by_name_tell_how_many_stages_a_rank_has() -> None:
    single, several, bent = map(get_schedule_class, ("1F1B", "interleaved_1f1b", "ZBVZeroBubble"))
    assert all(issubclass(kind, PlanSchedule) for kind in (single, several, bent))
    assert issubclass(single, schedules.PipelineScheduleSingle)
    assert issubclass(several, schedules.PipelineScheduleMulti)
    assert issubclass(bent, schedules.PipelineScheduleMulti)
    assert get_schedule_class("zb_v") is bent
    with pytest.raises(PlanError, match="1f2b"):
        get_schedule_class("1f2b")


def test_modules_that_imported_torchs_class_lookup_find_our_classes() -> None:
    """torchtitan does so: it recognises a V by the class."""
    module = ModuleType("program")
    vars(module).update(get=schedules.get_schedule_class, V=schedules.ScheduleZBVZeroBubble, other=schedules.__name__)
    use_in(module, zbvzerobubble="v_half")
    assert module.get("ZBVZeroBubble") is module.V is get_schedule_class("v_half")
    assert module.get("Interleaved1F1B") is get_schedule_class("interleaved_1f1b")
    assert module.other == schedules.__name__

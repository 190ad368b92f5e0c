"""torch's pipeline stages under our plans: the same bits as torch's own runtime.

Quick cases share one start of two processes, slow ones one of four.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from megatron_pp.errors import PlanError
from megatron_pp.integrations.torch_pipelining import PlanSchedule, get_schedule_class, use_in
from testkit.processes import run_processes
from testkit.sweeps import drawn
from tests.functional_tests import torch_pipelining_checks as checks

Cases = dict[str, tuple[str, Callable[..., float]]]  # name -> layout, check

QUICK: Cases = {
    **{name: ("whole", partial(checks.compare, name=name)) for name in ("1F1B", *checks.V_SHAPED)},
    "table of InterleavedZeroBubble": ("whole", partial(checks.compare, name="InterleavedZeroBubble", table=True)),
    "mixed dtypes": ("whole", partial(checks.compare, name="ZBVZeroBubble", make=checks.mixed)),
    "one weight twice": ("whole", partial(checks.compare, name="ZBVZeroBubble", make=checks.tied)),
    "our order in torch": ("whole", partial(checks.compare_plan, name="zb_v", order=True)),
    "dw_builder": ("whole", partial(checks.compare_builders, name="ZBVZeroBubble")),
    "dw_builder, whole backwards": ("whole", partial(checks.compare_builders, name="Interleaved1F1B")),
    "split_weight_grad": ("whole", checks.compare_store),
    "one gradient for two, and none": ("whole", checks.compare_split),
    "a builder beside a layer that splits": ("whole", checks.compare_builder_beside),
    "further settings": ("whole", checks.compare_settings),
    "microbatches given, two steps": ("whole", checks.compare_given),
}
# Of the sweeps over all schedules a part is drawn, of schedules with whole and with split backwards each. QUICK has
# some of them on two ranks.
WHOLE = [name for name in checks.CHUNKS if name not in checks.SPLITTING]
SLOW: Cases = {
    **{
        f"{name}, 4 ranks": ("whole", partial(checks.compare, name=name))
        for name in (*drawn(WHOLE, 2), *drawn(checks.SPLITTING, 2))
    },
    **{
        f"{name}, 2 ranks": ("replicas", partial(checks.compare, name=name))
        for name in checks.CHUNKS
        if name not in QUICK
    },
    **{
        f"{name}, replicas": ("replicas", partial(checks.compare_replicas, name=name))
        for name in (*drawn(WHOLE, 2), *drawn(checks.SPLITTING, 2))
    },
    **{
        f"table of {name}": ("replicas", partial(checks.compare, name=name, table=True))
        for name in ("Interleaved1F1B", *checks.V_SHAPED)
    },
    **{f"our {name} in torch": ("replicas", partial(checks.compare_plan, name=name)) for name in ("v_half", "1f1b_v")},
    **{
        f"our order of {name} in torch": ("replicas", partial(checks.compare_plan, name=name, order=True))
        for name in ("interleaved_1f1b", "dualpipe_v")
    },
    "mixed dtypes, 1F1B": ("whole", partial(checks.compare, name="1F1B", make=checks.mixed)),
    "stages of pipeline()": ("whole", checks.compare_traced),
}


def _rank_main(rank: int, size: int, cases: Cases) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    layouts = checks.layouts(size)
    found: dict[str, Any] = {name: check(layouts[layout]) for name, (layout, check) in cases.items()}
    return {**found, "refusals": checks.refusals(layouts["whole"])} if size == 2 else found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_processes(_rank_main, 2, (QUICK,), timeout=180, start_method="mixed")


@pytest.fixture(scope="module")
def slow_results() -> list[dict[str, Any]]:
    return run_processes(_rank_main, 4, (SLOW,), timeout=400, start_method="mixed")


@pytest.mark.parametrize("case", QUICK)
def test_losses_outputs_and_gradients_are_torchs_to_the_last_bit(results: list[dict[str, Any]], case: str) -> None:
    assert [of_rank[case] for of_rank in results] == [0.0] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_so_they_are_under_each_of_torchs_schedules(slow_results: list[dict[str, Any]], case: str) -> None:
    assert [of_rank[case] for of_rank in slow_results] == [0.0] * 4


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
def test_misuse_is_refused_on_every_rank_before_anything_is_sent(results: list[dict[str, Any]], misuse: str) -> None:
    for of_rank in results:
        assert re.search(REFUSALS[misuse], of_rank["refusals"][misuse])


def test_classes_by_name_tell_how_many_stages_a_rank_has() -> None:
    single, several, bent = map(get_schedule_class, ("1F1B", "interleaved_1f1b", "ZBVZeroBubble"))
    assert all(issubclass(kind, PlanSchedule) for kind in (single, several, bent))
    assert issubclass(single, schedules.PipelineScheduleSingle)
    assert issubclass(several, schedules.PipelineScheduleMulti)
    assert issubclass(bent, schedules.PipelineScheduleMulti)
    assert get_schedule_class("zb_v") is bent
    with pytest.raises(PlanError, match="1f2b"):
        get_schedule_class("1f2b")


def test_a_module_that_imported_torchs_names_asks_here() -> None:
    """As torchtitan does: it knows a V by the class."""
    module = ModuleType("program")
    vars(module).update(get=schedules.get_schedule_class, V=schedules.ScheduleZBVZeroBubble, other=schedules.__name__)
    use_in(module, zbvzerobubble="v_half")
    assert module.get("ZBVZeroBubble") is module.V is get_schedule_class("v_half")
    assert module.get("Interleaved1F1B") is get_schedule_class("interleaved_1f1b")
    assert module.other == schedules.__name__

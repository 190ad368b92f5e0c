"""The nearest of the names that are known, in every message about one that is not."""

from __future__ import annotations

import pytest

from megatron_pp.common.names import nearest_name, unknown
from megatron_pp.config.model_config import ModelParallelConfig
from megatron_pp.errors import ConfigError, PlanError, ScheduleError
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES, find_family


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *(("1F1B", "1f1b"), ("1f1b-v", "1f1b_v"), ("GPipe", "gpipe"), ("ZBV", "zb_v"), ("ZB-H1", "zb_h1")),
        *(("zbh2", "zb_h2"), ("DualPipeV", "dualpipe_v"), ("dualpipe", "dualpipe_v"), ("vhalf", "v_half")),
        *(("Interleaved1F1B", "interleaved_1f1b"), ("interleaved", "interleaved_1f1b")),
        *(("interleavd_zb", "interleaved_zb"),),
        *(("breadthfirst", "breadth_first"), ("automatic", "auto"), ("egaer_1f1b", "eager_1f1b")),
        *(("nonsense", ""), ("", ""), ("--", "")),
    ],
)  # fmt: skip
def test_the_nearest_name_ignores_case_punctuation_and_typing_errors(given, meant):
    assert nearest_name(given, SCHEDULES) == meant


def test_an_unknown_name_is_reported_with_the_nearest_and_the_possible_names():
    assert unknown("colour", "gren", ["red", "green"]) == (
        "colour 'gren' is not known (did you mean green?); it is one of red, green"
    )
    assert unknown("colour", 7, ["red", "green"]) == "colour 7 is not known; it is one of red, green"


def test_plan_errors_suggest_the_nearest_name():
    with pytest.raises(PlanError, match=r"schedule 'zbv' is not known \(did you mean zb_v\?\); it is one of gpipe"):
        find_family("zbv")
    with pytest.raises(PlanError, match=r"lowering policy 'Overlap' is not known \(did you mean overlap\?\)"):
        PlanSpec("1f1b", 2, 1, 2, policy="Overlap")
    with pytest.raises(ScheduleError, match=r"pipeline_schedule is '1F1B' \(did you mean 1f1b\?\); it must be one of"):
        ModelParallelConfig(pipeline_schedule="1F1B")
    with pytest.raises(ConfigError, match=r"p2p_channels is 'one-way' \(did you mean one_way\?\); it must be one of"):
        ModelParallelConfig(p2p_channels="one-way")

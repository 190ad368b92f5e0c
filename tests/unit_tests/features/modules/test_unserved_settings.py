"""Settings that a pipeline of several modules does not have are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import ScheduleInputError
from megatron_pp.features.modules.modules_step import check_settings, unserved_setting
from megatron_pp.features.pairs.pair_runner import in_turn


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"pipeline_schedule": "zb_h1"}, "pipeline_schedule 'zb_h1'"),
        ({"p2p_channels": "shared"}, "p2p_channels 'shared'"),
        ({"sequence_slices": 2}, "sequence_slices"),
        ({"skip_tensors": "a=0>1"}, "skip_tensors"),
        ({"offload_chunks": 1}, "offload_chunks"),
        ({"fsdp_collectives": "per_step"}, "fsdp_collectives"),
        ({"overlapped_forward_backward": in_turn}, "overlapped_forward_backward"),
        ({"microbatch_costs": [1.0, 2.0]}, "microbatch_costs"),
        ({"measure": 2}, "measure"),
        ({"trace_dir": "traces"}, "trace_dir"),
        ({"cuda_graph_impl": "transformer_engine"}, "cuda_graph_impl 'transformer_engine'"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_settings_that_several_modules_lack_are_refused(fields: dict[str, Any], what: str) -> None:
    settings = StepSettings.from_config(SimpleNamespace(**fields))
    assert unserved_setting(settings) == what
    with pytest.raises(ScheduleInputError, match=f"a pipeline of several modules has no {what}; leave it out"):
        check_settings(settings)


def test_settings_that_several_modules_support_are_accepted() -> None:
    assert unserved_setting(StepSettings.from_config(SimpleNamespace(pipeline_schedule="1f1b"))) is None

"""Megatron-core's grids of ranks as modules of the engine's."""

from __future__ import annotations

import os
from typing import Any

from testkit.models.module_grids import module_on
from tests.functional_tests.megatron_support import in_megatrons_process, needs_megatron

pytestmark = needs_megatron

GRIDS = {  # sizes of the dimensions, in Megatron's order, the first one fastest
    "line": {"tp": 1, "cp": 1, "pp": 4, "dp": 1},
    "all": {"tp": 2, "cp": 1, "pp": 2, "dp": 2},
    "stages_outermost": {"tp": 2, "dp": 2, "pp": 2},
    "experts": {"tp": 1, "cp": 1, "pp": 2, "dp": 2, "ep": 2},
    "experts_alone": {"tp": 1, "cp": 1, "pp": 2, "dp": 2, "ep": 1, "expt_dp": 1},
}


def modules_of_grids(case: Any) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "16"  # the grid's call if there is no process group of that size
    from megatron.core.hyper_comm_grid import HyperCommGrid

    from megatron_pp.integrations.megatron.steps.modules import _module_of

    found = {}
    for name, sizes in GRIDS.items():
        module = _module_of(name, HyperCommGrid(list(sizes.values()), list(sizes), rank_offset=8))
        found[name] = None if module is None else module.ranks
    return found


def test_grids_are_read_as_replicas_of_lines_of_stages() -> None:
    found = in_megatrons_process(modules_of_grids)

    def ranks(**sizes: int) -> list[list[list[int]]]:
        return [[list(stage) for stage in replica] for replica in module_on("any", 8, **sizes).ranks]

    assert found["line"] == ranks(pp=4)
    assert found["all"] == ranks(tp=2, pp=2, dp=2)
    assert found["stages_outermost"] == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]
    assert found["experts_alone"] == ranks(pp=2, dp=2)
    assert found["experts"] is None, "an expert-parallel rank is no replica and no stage"

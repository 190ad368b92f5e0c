"""``verify`` accepts every default plan under the rules of the device: a drawn part of the grid, or with
MEGATRON_PP_EXHAUSTIVE=1 all 55,104 plans."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.ir.spec import DEVICE_SYNC, ONE_QUEUE, POLICIES, STATIC_BUFFERS, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.verify.verifier import verify
from testkit.sweeps import EXHAUSTIVE

FAMILIES = [family for family in SCHEDULES.values() if family.search is None]
RULES = ((), (DEVICE_SYNC,), (STATIC_BUFFERS,), (DEVICE_SYNC, STATIC_BUFFERS))
DRAWN = 8


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_default_plans_pass_in_one_queue_and_with_more_rules(family: Any) -> None:
    chunks = (1, 2, 3) if family.chunks is None else (family.chunks,)
    grid = list(itertools.product(range(2, 9), chunks, range(2, 18), POLICIES, RULES))
    if not EXHAUSTIVE:
        grid = random.Random(family.name).sample(grid, DRAWN)
    for p, v, m, policy, more in grid:
        verify(lowered_plan(PlanSpec(family.name, p, v, m, policy=policy, device=(ONE_QUEUE, *more))))

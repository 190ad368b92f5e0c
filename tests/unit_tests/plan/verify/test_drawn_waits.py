"""No plan that NCCL runs by default hangs, whichever of its instructions wait for an idle device."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import ON_NCCL, ONE_QUEUE, OVERLAP, STATIC_BUFFERS, Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from testkit.device_runs.drawn_waits import check_with_waits, drawn_waits
from testkit.inputs.drawn_specs import NAMED, drawn_spec
from testkit.sweeps import EXHAUSTIVE, drawn

SHARES = (0.02, 0.05, 0.1, 0.3, 1.0)
PLANS = 10_000 if EXHAUSTIVE else 1_000
PARTS = 4


def drawn_plan(schedule: str, rng: random.Random) -> Plan:
    """For the rules of NCCL. The settings that go with them are drawn; a lone rank has nothing to post."""
    while True:
        device = (*ON_NCCL, STATIC_BUFFERS) if rng.random() < 0.2 else ON_NCCL
        spec = drawn_spec(schedule, rng, device=device)
        if spec.pipeline_size > 1:
            return build_plan(spec)


@pytest.mark.parametrize("part", drawn(range(PARTS), 2))
def test_no_default_plan_hangs_whichever_of_its_instructions_wait(part: int) -> None:
    rng = random.Random(f"waits {part}")
    waits = Counter[float]()
    for n in range(PLANS // PARTS):
        plan = drawn_plan(NAMED[n % len(NAMED)], rng)
        share = SHARES[n // len(NAMED) % len(SHARES)]
        for compute in (True, False):
            chosen = drawn_waits(plan, share, rng, compute)
            check_with_waits(plan, chosen)
            waits[share] += sum(map(len, chosen))
    assert min(waits[share] for share in SHARES) > 100, waits


@pytest.mark.parametrize("schedule", [name for name, family in SCHEDULES.items() if family.search is not None])
def test_no_searched_plan_hangs_whichever_of_its_instructions_wait(schedule: str) -> None:
    plan, rng = build_plan(PlanSpec(schedule, 2, 2, 6, device=ON_NCCL)), random.Random(schedule)
    for share in SHARES:
        check_with_waits(plan, drawn_waits(plan, share, rng, compute=False))


def shares_that_hang(spec: PlanSpec, draws: int = 20) -> dict[float, float]:
    """The share of drawn runs that hang, by the probability with which each compute operation waits."""
    plan, rng, hangs = build_plan(spec), random.Random(1), Counter[float]()
    for share in SHARES:
        for _ in range(draws):
            try:
                check_with_waits(plan, drawn_waits(plan, share, rng, compute=True))
            except PlanError:
                hangs[share] += 1
    return {share: hangs[share] / draws for share in SHARES}


@pytest.mark.parametrize("schedule", ["1f1b", "gis_h", "interleaved_1f1b"])
def test_receives_posted_without_regard_to_waits_hang(schedule: str) -> None:
    """Two ranks that wait, each with the receive posted of what the other is about to make."""
    chunks = 1 if schedule == "1f1b" else 2
    found = shares_that_hang(PlanSpec(schedule, 4, chunks, 16, policy=OVERLAP, device=(ONE_QUEUE,)))
    assert found[1.0] == 1.0, found
    assert sorted(found.values()) == [*found.values()], "the more wait, the more runs hang"
    assert shares_that_hang(PlanSpec(schedule, 4, chunks, 16, policy=OVERLAP, device=ON_NCCL)) == dict.fromkeys(
        SHARES, 0.0
    )

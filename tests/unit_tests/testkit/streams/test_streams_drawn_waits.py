"""The engine on virtual devices, with drawn instructions that wait for an idle device: no default plan hangs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megatron_pp.errors import PipelineError
from megatron_pp.plan.ir.spec import ON_NCCL, ONE_QUEUE, OVERLAP, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from testkit.device_runs.drawn_waits import waiting_engine
from testkit.device_runs.stream_runs import plan_on_streams
from testkit.inputs.drawn_specs import NAMED, drawn_spec
from testkit.sweeps import EXHAUSTIVE

SHARES = (0.02, 0.1, 0.5, 1.0)
TIMES = 20 if EXHAUSTIVE else 1
UNTIED = [name for name in NAMED if not name.startswith("vocab")]  # without collectives of an output layer


def spec_of(schedule: str, rng: random.Random) -> PlanSpec:
    """What the exact model can run: 4 or 8 microbatches, and sequences of two tokens."""
    fixed: dict[str, Any] = {"device": ON_NCCL, "num_microbatches": rng.choice((4, 8)), "measured": None}
    if SCHEDULES[schedule].sliced:
        fixed |= {"slices": 2, "variable_shapes": False}
    while True:
        spec = drawn_spec(schedule, rng, **fixed)
        if spec.pipeline_size > 1:
            return spec


@pytest.mark.parametrize(("n", "schedule"), list(enumerate(UNTIED)))
def test_no_default_plan_hangs(n: int, schedule: str) -> None:
    """Shares take turns over schedules and over the times that each one runs."""
    for seed in range(TIMES):
        share = SHARES[(n + seed) % len(SHARES)]
        spec = spec_of(schedule, random.Random(f"{schedule} {seed}"))
        report = plan_on_streams(spec, waiting_engine(share, seed), seed=seed)
        assert not report.races, f"{spec}: {report}"


def test_a_plan_that_posts_without_regard_to_waits_hangs() -> None:
    spec = PlanSpec("1f1b", 2, 1, 8, policy=OVERLAP, device=(ONE_QUEUE,))
    with pytest.raises((RuntimeError, PipelineError), match=r"the device of rank . hangs at"):
        plan_on_streams(spec, waiting_engine(1.0, 0))

"""Steps whose number of microbatches changes: repeated plans give one process's gradients on hostile networks."""

from __future__ import annotations

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.repeated import Repeated
from megatron_pp.plan.ir.spec import POLICIES, PlanSpec
from megatron_pp.testing.adversarial_transports import HOSTILE_NETWORKS
from megatron_pp.testing.toy import reference_run
from tests.harness.race_support import ExactBlock, exact_data, network_for, run_plan


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_of_changing_size_have_the_gradients_of_one_process(policy: str) -> None:
    for step, count in enumerate((12, 16, 4)):
        plan = build_plan(PlanSpec("interleaved_1f1b", 2, 2, count, policy=policy))
        assert isinstance(plan.programs, Repeated) == (count > 4)
        data = exact_data(count)
        network = network_for(plan, HOSTILE_NETWORKS[step % len(HOSTILE_NETWORKS)], seed=step)
        outcome = run_plan(plan, data, network)
        expected = reference_run(plan.placement.num_stages, data, block=ExactBlock)
        assert outcome.result.difference(expected) == 0
        assert not outcome.complaints + network.violations

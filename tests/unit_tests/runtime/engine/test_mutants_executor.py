"""Engine mutants: each fault around the freeing of buffers is caught by a hostile network, and each wall against it
stands alone.

First wall: FREE waits before it frees. Second wall: the handle owns the bytes. A poisoning network sees through the
second; a core that owns nothing takes it away.
"""

from __future__ import annotations

import pytest

from megatron_pp.comm.communicator import P2PCore
from megatron_pp.comm.wait_handle import WaitHandle
from megatron_pp.errors import PipelineError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.spec import BATCHED, PLAIN, SHARED, PlanSpec
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.runtime.engine.executor import PlanExecutor
from megatron_pp.testing.adversarial_transports import (
    HOSTILE_NETWORKS,
    HostileNetwork,
    LastMomentNetwork,
    PoisoningNetwork,
)
from megatron_pp.testing.toy import reference_run
from testkit.mutants.executor_mutants import EARLY_RELEASES, WRONG_READS, DeallocatesWhatItDefers, OwnsNothing
from testkit.thread_runs.race_support import ExactBlock, exact_data, network_for, run_plan

SPECS = {
    "1f1b": PlanSpec("1f1b", 3, 1, 8),
    "interleaved": PlanSpec("interleaved_1f1b", 2, 2, 8),
    "zb_v": PlanSpec("zb_v", 3, 2, 8),
}
MORE_SPECS = {
    **SPECS,
    "plain": PlanSpec("1f1b", 2, 1, 8, policy=PLAIN),
    "batched": PlanSpec("interleaved_1f1b", 4, 2, 8, policy=BATCHED),
    "shared": PlanSpec("gpipe", 2, 1, 8, channels=SHARED),
    "forward_only": PlanSpec("interleaved_1f1b", 3, 2, 8, forward_only=True),
    "variable": PlanSpec("interleaved_1f1b", 2, 2, 8, variable_shapes=True),
}


def harm(
    spec: PlanSpec,
    network: type[HostileNetwork],
    executor: type[PlanExecutor] = PlanExecutor,
    core: type[P2PCore] = P2PCore,
    *,
    seed: int = 0,
) -> str:
    """What goes wrong in a step, in words; empty where losses and gradients are right to the last bit."""
    plan = build_plan(spec)
    data = exact_data(spec.num_microbatches, spec.variable_shapes)
    expected = reference_run(plan.placement.num_stages, data, spec.forward_only, block=ExactBlock)
    net = network_for(plan, network, seed=seed, pollable=executor is DeallocatesWhatItDefers)
    try:
        result = run_plan(plan, data, net, executor=executor, core=core).result
    except (PipelineError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    off = result.difference(expected)
    return f"off by {off}" if off else ""


@pytest.mark.slow
@pytest.mark.parametrize("network", HOSTILE_NETWORKS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", MORE_SPECS)
def test_the_engine_alone_prevents_corruption_if_handles_own_nothing(name: str, network: type[HostileNetwork]) -> None:
    """The engine as it is, with handles that own nothing."""
    for seed in range(3):
        assert harm(MORE_SPECS[name], network, core=OwnsNothing, seed=seed) == ""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", EARLY_RELEASES)
def test_handles_that_own_the_bytes_prevent_corruption_if_the_engine_frees_early(mutant: type[PlanExecutor]) -> None:
    """An engine that frees early, with handles that own the bytes."""
    for spec in SPECS.values():
        assert harm(spec, LastMomentNetwork, mutant) == ""


@pytest.mark.parametrize(
    ("network", "core"),
    [(PoisoningNetwork, P2PCore), pytest.param(LastMomentNetwork, OwnsNothing, marks=pytest.mark.slow)],
    ids=["with both walls there", "without ownership"],
)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mutant", EARLY_RELEASES + WRONG_READS)
def test_every_executor_mutant_is_caught(
    mutant: type[PlanExecutor], name: str, network: type[HostileNetwork], core: type[P2PCore]
) -> None:
    assert harm(SPECS[name], network, mutant, core) != ""


class NeverFrees(PlanExecutor):
    """Waits for sends and keeps what they have sent."""

    def _wait_then_free(self, handle: WaitHandle, at: Task) -> None:
        handle.wait()


def test_a_step_that_keeps_a_tensor_to_its_end_fails() -> None:
    spec = PlanSpec("1f1b", 2, 1, 2)
    plan = build_plan(spec)
    net = network_for(plan, LastMomentNetwork, seed=0, pollable=False)
    with pytest.raises(AssertionError, match=r"tensors or handles left: .*input gradients"):
        run_plan(plan, exact_data(2, False), net, executor=NeverFrees)

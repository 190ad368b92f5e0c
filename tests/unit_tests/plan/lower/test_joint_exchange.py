"""Where exchanges block, a forward and the backward behind it have one, if all ranks have them in turn together."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import format_program
from megatron_pp.plan.ir.spec import BATCHED, DEVICE_SYNC, ONE_QUEUE, OVERLAP, PLAIN, Plan, PlanSpec
from megatron_pp.plan.simulate.simulator import simulate

BLOCKING = [(PLAIN, False), (PLAIN, True), (BATCHED, False), (BATCHED, True), (OVERLAP, True)]
IN_STEP = [
    ("interleaved_1f1b", 2, 2, 8, 0),
    ("interleaved_1f1b", 4, 2, 16, 0),
    ("interleaved_1f1b", 4, 3, 16, 8),
    ("interleaved_1f1b", 3, 2, 11, 4),
    ("combined_1f1b", 4, 2, 8, 0),
    ("interleaved_zb", 4, 2, 16, 0),
]


def plan_of(schedule: str, p: int, v: int, m: int, group: int, policy: str, variable: bool) -> Plan:
    return build_plan(PlanSpec(schedule, p, v, m, group, policy, variable_shapes=variable))


def between_forward_and_backward(plan: Plan, rank: int) -> list[str]:
    """The posts that stand between a forward and a backward that follow each other on ``rank``."""
    found, since, last = [], [], None
    for at in ins.each(plan.programs[rank]):
        if at.op in ins.COMPUTE_OPS:
            if last == ins.FORWARD and at.op in ins.BACKWARD_OPS:
                found += since
            since, last = [], at.op
        elif at.op in ins.POST_OPS:
            since.append(str(at))
    return found


def test_the_plain_program_of_1f1b() -> None:
    """What rank 1 does from the end of its warm-up: after each forward and backward one exchange with both sides."""
    program = format_program(plan_of("interleaved_1f1b", 2, 2, 4, 0, PLAIN, False).programs[1])
    assert (
        " F1.1 B1.1 RECV_F0.2 RECV_B0.0 SEND_B1.1 WAIT_F0.2 WAIT_B0.0 FREE_B1.1"
        " F0.2 B0.0 RECV_F0.3 RECV_B0.1 SEND_F0.2 SEND_B0.0 WAIT_F0.3 WAIT_B0.1 FREE_F0.2 FREE_B0.0 F0.3 B0.1 "
    ) in program


@pytest.mark.parametrize(("policy", "variable"), BLOCKING)
@pytest.mark.parametrize("shape", IN_STEP)
def test_nothing_is_posted_between_a_forward_and_its_backward(shape: tuple, policy: str, variable: bool) -> None:
    plan = plan_of(*shape, policy, variable)
    assert [between_forward_and_backward(plan, rank) for rank in range(shape[1])] == [[]] * shape[1]


@pytest.mark.parametrize(
    "shape",
    [
        ("1f1b", 4, 1, 8, 0),
        ("interleaved_1f1b", 4, 1, 8, 0),  # one chunk a rank: the order of 1F1B
        ("interleaved_1f1b", 4, 2, 9, 0),  # a last group shorter than the pipeline
        ("interleaved_1f1b", 4, 2, 8, 2),
        ("interleaved_1f1b", 4, 2, 4, 0),  # few take turns
        ("interleaved_1f1b", 2, 2, 2, 0),
        ("zb_v", 4, 2, 8, 0),
    ],
)
def test_other_orders_exchange_after_each(shape: tuple) -> None:
    """Forwards and backwards of these orders wait for each other, so they cannot share an exchange."""
    assert any(between_forward_and_backward(plan_of(*shape, PLAIN, False), rank) for rank in range(shape[1]))


def test_overlap_posts_each_message_as_soon_as_it_is_produced() -> None:
    plan = plan_of("interleaved_1f1b", 4, 2, 16, 0, OVERLAP, False)
    assert any(between_forward_and_backward(plan, rank) for rank in range(4))


@pytest.mark.parametrize(("policy", "variable"), BLOCKING)
@pytest.mark.parametrize("shape", IN_STEP)
def test_a_step_is_hardly_longer_than_with_overlap(shape: tuple, policy: str, variable: bool) -> None:
    """Backwards of two forwards, as of real layers: ranks that met after every operation took 1.05 to 1.2 of it."""
    costs = StageCosts.uniform(shape[1] * shape[2], 1.0, 1.2, 0.8)
    network = Network(1.0, link=Link(bandwidth=1.0 / 0.02))
    overlap, blocking = (
        simulate(plan_of(*shape, *how), costs, network).makespan for how in ((OVERLAP, False), (policy, variable))
    )
    assert blocking <= 1.06 * overlap


@pytest.mark.parametrize(("policy", "variable"), BLOCKING)
@pytest.mark.parametrize("shape", [*IN_STEP, ("interleaved_zb", 2, 2, 12, 4), ("interleaved_zb", 2, 4, 3, 0)])
def test_one_hardware_queue_does_not_deadlock(shape: tuple, policy: str, variable: bool) -> None:
    """A send that its shape holds back would stand before the receive of an earlier round, for which its peer waits."""
    for device, skipped in product(((ONE_QUEUE,), (ONE_QUEUE, DEVICE_SYNC)), ((), "a=0>2")):
        how = {"variable_shapes": variable, "device": device, "skip_tensors": skipped}
        plan = build_plan(PlanSpec(*shape, policy, **how))
        assert set(device) <= set(plan.certificate.rules)

"""The rules of the device: what each refuses, and that every plan is lowered so that it passes those its run needs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.dataflow import RESULT_OF, inputs_of
from megatron_pp.plan.ir.instruction import (
    BACKWARD,
    COMPUTE_OPS,
    FORWARD,
    INPUT_GRAD,
    JOINED_OPS,
    WEIGHT_GRAD,
    instruction,
)
from megatron_pp.plan.ir.placement import PLACEMENTS, Placement
from megatron_pp.plan.ir.spec import (
    ANY_WAIT,
    CHANNELS,
    DEVICE_RULES,
    DEVICE_SYNC,
    ONE_QUEUE,
    POLICIES,
    RENDEZVOUS,
    SHARED,
    STATIC_BUFFERS,
    PlanSpec,
)
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders.family import Order
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import edited, refusal, with_programs

# -- one hardware queue -----------------------------------------------------------------------------------------------


def test_a_receive_posted_two_ahead_hangs_in_one_queue() -> None:
    """Rank 0's second receive stands behind the first, and the send that rank 1 waits for behind both."""
    plan = edited(lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 2)), 0, "move RECV_F1.1 behind RECV_F1.0")
    verify(plan)  # where there are more queues, it is early and does no harm
    assert refusal(plan, ONE_QUEUE) == (
        "deadlock under one_queue: rank 0 waits at RECV_F1.1 for rank 1 to post the send that matches RECV_F1.0 (its "
        "RECV_F1.1 is queued behind it, and all that follows behind that); rank 1 waits at WAIT_F0.0 for rank 0 to "
        "post the send that matches RECV_F0.0"
    )


def test_a_send_behind_an_unfinished_one_hangs_in_one_queue() -> None:
    """Rank 1's second gradient stands behind the first, which rank 0 takes once its last output is taken."""
    plan = with_programs(
        lowered_plan(PlanSpec("eager_1f1b", 2, 1, 3)),
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 F0.2 SEND_F0.2 FREE_F0.0 FREE_F0.1 FREE_F0.2 RECV_B0.0 WAIT_B0.0 B0.0 RECV_B0.1 "
        "WAIT_B0.1 B0.1 RECV_B0.2 WAIT_B0.2 ENABLE_GRAD_SYNC0 B0.2",
        "RECV_F0.0 WAIT_F0.0 F0.0 B0.0 SEND_B0.0 RECV_F0.1 WAIT_F0.1 F0.1 B0.1 SEND_B0.1 RECV_F0.2 WAIT_F0.2 F0.2 "
        "ENABLE_GRAD_SYNC0 B0.2 FREE_B0.0 FREE_B0.1 SEND_B0.2 FREE_B0.2",
    )
    verify(plan)
    assert refusal(plan, ONE_QUEUE) == (
        "deadlock under one_queue: rank 0 waits at FREE_F0.2 for rank 1 to post the receive that matches SEND_F0.2; "
        "rank 1 waits at SEND_B0.1 for rank 0 to post the receive that matches SEND_B0.0 (its SEND_B0.1 is queued "
        "behind it, and all that follows behind that)"
    )


def test_shapes_ahead_of_tensors_hold_the_queue_until_they_are_read() -> None:
    """Two neighbours send to each other before either has posted the receive of the other's shape."""
    spec = PlanSpec("1f1b", 2, 1, 3, variable_shapes=True)
    plan = lowered_plan(spec)
    verify(plan, device=(ONE_QUEUE,))
    sends_first = edited(plan, 0, "move RECV_B0.0 behind SEND_F0.1")
    sends_first = edited(sends_first, 1, "move RECV_F0.1 behind SEND_B0.0")
    sends_first = edited(sends_first, 1, "move WAIT_F0.1 behind RECV_F0.1")
    verify(sends_first)
    assert refusal(sends_first, ONE_QUEUE) == (
        "deadlock under one_queue: rank 0 waits at SEND_F0.1 for rank 1 to post the receive that matches SEND_F0.1; "
        "rank 1 waits at SEND_B0.0 for rank 0 to post the receive that matches SEND_B0.0"
    )


# -- a device synchronisation within compute --------------------------------------------------------------------------


def test_a_receive_ahead_hangs_where_compute_synchronises_the_device() -> None:
    plan = lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 2))
    verify(plan, device=(ONE_QUEUE,))
    assert refusal(plan, DEVICE_SYNC) == (
        "deadlock under device_sync: rank 0 waits at F0.1, which synchronises the device, for rank 1 to post the send "
        "that matches RECV_F1.0; rank 1 waits at F0.0, which synchronises the device, for rank 0 to post the send that "
        "matches RECV_F0.1"
    )


def test_receives_are_posted_at_their_round_where_compute_synchronises_the_device() -> None:
    spec = PlanSpec("interleaved_1f1b", 2, 2, 6, lookahead=3)
    synced = lowered_plan(replace(spec, device=(DEVICE_SYNC,)))
    assert synced.programs == lowered_plan(replace(spec, lookahead=0, device=(ANY_WAIT,))).programs
    assert synced.programs != lowered_plan(spec).programs


# -- static buffers ---------------------------------------------------------------------------------------------------


def test_a_gradient_on_its_way_two_backwards_later_is_refused() -> None:
    spec = PlanSpec("1f1b", 2, 1, 6, release_after=3)
    assert refusal(lowered_plan(spec), STATIC_BUFFERS) == (
        "rank 1: F0.2 (forward of chunk 0, microbatch 2) may overwrite the input gradient of B0.0, which is still "
        "being sent: under static_buffers its buffer is reused after the next backward"
    )
    plan = lowered_plan(replace(spec, device=(STATIC_BUFFERS,)))
    verify(plan)
    assert "F0.2" in refusal(edited(plan, 1, "move FREE_B0.0 behind F0.2"), STATIC_BUFFERS)


def test_a_gradient_that_is_sent_before_the_next_backward_is_accepted() -> None:
    verify(lowered_plan(PlanSpec("1f1b", 2, 1, 6, policy="plain")), device=(STATIC_BUFFERS,))


def test_a_gradient_hand_off_that_comes_too_late_is_refused() -> None:
    """Within a rank nothing is sent, but the gradient lies in the same buffer until it is used."""
    verify(lowered_plan(PlanSpec("breadth_first", 1, 2, 2)), device=(STATIC_BUFFERS,))
    assert refusal(lowered_plan(PlanSpec("breadth_first", 1, 2, 3)), STATIC_BUFFERS) == (
        "rank 0: B1.2 (backward of chunk 1, microbatch 2) may overwrite the input gradient of B1.0, which is not used "
        "yet: under static_buffers its buffer is reused after the next backward"
    )


@pytest.mark.parametrize("pairs", [False, True])
def test_a_pairs_forward_runs_before_its_backward_reads(pairs: bool) -> None:
    plan = lowered_plan(PlanSpec("combined_1f1b", 1, 2, 3, group_size=2, overlap_pairs=pairs))
    assert any(at.op in JOINED_OPS for at in plan.programs[0]) == pairs
    assert refusal(plan, STATIC_BUFFERS).startswith("rank 0: F1.2 (forward of chunk 1, microbatch 2) may overwrite")


# -- every plan passes the rules that its run needs -------------------------------------------------------------------


def random_orders(placement: Placement, microbatches: int, rng: random.Random) -> list[Order]:
    """Any orders that can run: each rank takes whatever its data allow, microbatches of a chunk in order."""
    split = rng.random() < 0.5
    done: set[tuple[str, int, int]] = set()
    orders: list[Order] = [[] for _ in placement.stages]
    kinds = (FORWARD, INPUT_GRAD, WEIGHT_GRAD) if split else (FORWARD, BACKWARD)
    left = {
        (rank, op, chunk): 0 for rank, row in enumerate(placement.stages) for chunk in range(len(row)) for op in kinds
    }
    likely = [rng.choice((0.1, 0.5, 0.9)) for _ in kinds]
    while left:
        able = [
            (rank, op, chunk)
            for (rank, op, chunk), mb in left.items()
            if all((r, s, mb) in done for r, s in inputs_of(op, placement.stages[rank][chunk], placement.num_stages))
        ]
        weights = [likely[kinds.index(op)] for _, op, _ in able]
        rank, op, chunk = rng.choices(able, weights)[0]
        mb = left[rank, op, chunk]
        orders[rank].append(instruction(op, chunk, mb))
        if op in RESULT_OF:
            done.add((RESULT_OF[op], placement.stages[rank][chunk], mb))
        left[rank, op, chunk] += 1
        if mb + 1 == microbatches:
            del left[rank, op, chunk]
    return orders


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_order_that_can_run_passes(seed: int) -> None:
    """Nothing in the lowering relies on what makes a good schedule."""
    rng = random.Random(seed)
    for _ in range(6):
        p, v, m = rng.randint(2, 4), rng.randint(1, 3), rng.randint(1, 7)
        placement = Placement(rng.choice(PLACEMENTS), p, v)
        orders = random_orders(placement, m, rng)
        for policy, channels, variable in itertools.product(POLICIES, CHANNELS, (False, True)):
            spec = PlanSpec(
                "1f1b",
                p,
                v,
                m,
                policy=policy,
                channels=channels,
                variable_shapes=variable,
                lookahead=rng.randint(0, 4),
                release_after=rng.randint(1, 4),
                overlap_pairs=rng.random() < 0.5,
                device=(ONE_QUEUE, *(DEVICE_SYNC,) * rng.randint(0, 1)),
            )
            verify(lowered(spec, placement, orders))


# -- specs and files --------------------------------------------------------------------------------------------------


def test_rules_of_a_spec_have_one_form() -> None:
    spec = PlanSpec("1f1b", 2, 1, 4, device=[STATIC_BUFFERS, RENDEZVOUS, ONE_QUEUE, ONE_QUEUE])  # type: ignore[arg-type]
    assert spec.device == (ONE_QUEUE, STATIC_BUFFERS)
    assert spec == PlanSpec("1f1b", 2, 1, 4, device=(ONE_QUEUE, STATIC_BUFFERS))
    with pytest.raises(PlanError) as caught:
        PlanSpec("1f1b", 2, 1, 4, device=("two_queues",))
    known = f"(did you mean one_queue?); it is one of {', '.join(DEVICE_RULES)}"
    assert str(caught.value) == f"device rule 'two_queues' is not known {known}"


# -- simulated --------------------------------------------------------------------------------------------------------

SLOW_LINK = Network(link=Link(3.0))


def compute_ends(result: Simulation) -> list[float]:
    """When rank 0's forwards and backwards end."""
    return [event.end for event in result.events(0) if event.instruction.op in COMPUTE_OPS]


def test_a_post_behind_an_unfinished_transfer_takes_time_in_one_queue() -> None:
    """Rank 0 makes two outputs of one slot each, and a transfer takes three: the second send waits for the first, and
    the third forward for it.
    """
    plan = lowered_plan(PlanSpec("gpipe", 2, 1, 3, release_after=5, forward_only=True))
    costs = StageCosts.uniform(2)
    free, held = simulate(plan, costs, SLOW_LINK), simulate(plan, costs, SLOW_LINK, [ONE_QUEUE])
    assert compute_ends(free) == [1.0, 2.0, 3.0]
    assert compute_ends(held) == [1.0, 2.0, 5.0]
    # The second send is behind the first from 2 to 4; the third, from 5 on, behind the second, which is there at 7.
    assert held.waits[0].queued == 2.0 + 2.0
    assert free.waits[0].queued == 0.0


def test_compute_that_synchronises_ends_when_all_that_was_posted_is_over() -> None:
    """The second forward runs from 1 on, with a send under way that is there at 4; so does rank 1's first from 4 to 5,
    which posts its next receive then: the third one of rank 0 ends at 8.
    """
    plan = lowered_plan(PlanSpec("gpipe", 2, 1, 3, forward_only=True, device=(DEVICE_SYNC,)))
    synced = simulate(plan, StageCosts.uniform(2), SLOW_LINK, [DEVICE_SYNC])
    assert compute_ends(synced) == [1.0, 4.0, 8.0]
    assert synced.busy[0] == 3.0
    assert synced.waits[0].release == 2.0 + 3.0 + 4.0  # the last send after the last forward, from 8 to 12


@pytest.mark.parametrize("rule", [ONE_QUEUE, DEVICE_SYNC])
def test_a_plan_that_hangs_is_not_simulated(rule: str) -> None:
    plan = edited(lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 2)), 0, "move RECV_F1.1 behind RECV_F1.0")
    simulate(plan, StageCosts.uniform(4))
    with pytest.raises(PlanError, match=f"deadlock under {rule}: rank "):
        simulate(plan, StageCosts.uniform(4), device=[rule])


def test_without_waiting_the_rules_change_no_time() -> None:
    plan = lowered_plan(PlanSpec("interleaved_1f1b", 4, 2, 8, channels=SHARED, policy="batched"))
    costs = StageCosts.uniform(8)
    times = [simulate(plan, costs, SLOW_LINK, rules).makespan for rules in ((), [ONE_QUEUE], [ONE_QUEUE, DEVICE_SYNC])]
    assert times[0] == times[1] == times[2]

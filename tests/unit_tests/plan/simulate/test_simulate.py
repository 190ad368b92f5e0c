"""The simulator against closed forms, the logical clock, and small cases worked out by hand; steps in a row."""

from __future__ import annotations

import gc
import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan, lowered_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.costs.transports import GLOO_DETACHED_BYTES
from megatron_pp.plan.ir.instruction import COMPUTE_OPS
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import ANY_WAIT, BATCHED, CHANNELS, OVERLAP, POLICIES, SHARED, Plan, PlanSpec
from megatron_pp.plan.lower.clock import run_clock
from megatron_pp.plan.orders import SCHEDULES, find_family
from megatron_pp.plan.simulate.simulator import SimulatedRun, simulate
from megatron_pp.plan.simulate.steady import counts_on_bypass, in_a_row, longest_span, steady_step
from megatron_pp.plan.verify.queues import Entry
from megatron_pp.plan.verify.rendezvous import check_rendezvous
from testkit.inputs.plan_text import edited, placed, with_programs

UNIT_COSTS = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "breadth_first": 2}


def simulated(schedule, p, v, m, costs=None, network=None, **options):
    plan = build_plan(PlanSpec(schedule, p, v, m, **options))
    return simulate(plan, costs or StageCosts.uniform(p * v), network or Network())


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 3.0, 3.0)])
@pytest.mark.parametrize(
    ("p", "v", "m", "policy"),
    [
        *(
            (p, 1, m, policy)
            for p, m in ((1, 1), (1, 5), (2, 1), (2, 7), (3, 2), (4, 4), (4, 16), (8, 17))
            for policy in POLICIES
        ),
        # Under the other policies two operations have one exchange.
        *((*sizes, OVERLAP) for sizes in ((2, 2, 4), (2, 3, 6), (4, 2, 8), (4, 4, 4), (8, 2, 16), (8, 4, 8))),
    ],
)
def test_schedules_take_the_closed_form(p, v, m, policy, costs):
    """V M slots of F + B + W (per chunk) and a bubble of P - 1 of them: 1/V of 1F1B's (arXiv 2104.04473, 2.2.2)."""
    for schedule in ("gpipe", "1f1b") if v == 1 else ("interleaved_1f1b", "breadth_first"):
        result = simulated(schedule, p, v, m, StageCosts.uniform(p * v, *costs), policy=policy)
        assert result.makespan == pytest.approx((v * m + p - 1) * sum(costs))
        assert result.idle == pytest.approx(((p - 1) * sum(costs),) * p)
        assert result.bubble_share == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_forward_only_is_a_plain_pipeline(m):
    assert simulated("1f1b", 4, 1, m, forward_only=True).makespan == m + 3


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(sorted(UNIT_COSTS)),
    p=st.integers(1, 6),
    v=st.integers(1, 3),
    m=st.integers(1, 13),
    group=st.integers(0, 7),
    policy=st.sampled_from(POLICIES),
    channels=st.sampled_from(CHANNELS),
    variable=st.booleans(),
)
def test_equal_slots_and_free_transfers_are_the_logical_clock(schedule, p, v, m, group, policy, channels, variable):
    """Where every operation takes one slot, communication as lowered must never delay compute, whatever the policy,
    except where two operations have one exchange."""
    v = 1 if UNIT_COSTS[schedule] == 1 else v
    spec = PlanSpec(schedule, p, v, m, group_size=group, policy=policy, channels=channels, variable_shapes=variable)
    assume(not find_family(schedule).joint(spec.shape) or (policy == OVERLAP and not variable))
    plan = build_plan(spec)
    result = simulate(plan, StageCosts.uniform(p * v, backward=1.0))
    expected = run_clock(plan.orders, plan.placement).ends
    assert [[e.end for e in result.events(r) if e.instruction.op in COMPUTE_OPS] for r in range(p)] == expected


def test_every_instruction_has_its_time_in_order():
    result = simulated("interleaved_1f1b", 4, 2, 8, network=Network(8.0, link=Link(0.1, 16.0)))
    for rank, program in enumerate(result.plan.programs):
        events = list(result.events(rank))
        assert [e.instruction for e in events] == list(program)
        assert events[0].start == 0.0
        assert all(e.start <= e.end for e in events)
        assert all(a.end == b.start for a, b in pairwise(events))


def test_transfers_by_hand():
    """Two ranks, one microbatch: F, 0.5 on the wire plus 0.25 latency, F, B (2), the same way back, B."""
    result = simulated("gpipe", 2, 1, 1, network=Network(4.0, link=Link(latency=0.25, bandwidth=8.0)))
    assert result.makespan == 1 + 0.75 + 1 + 2 + 0.75 + 2
    there, back = result.transfers
    assert (there.source, there.target, there.kind, there.stage, there.mb) == (0, 1, "F", 1, 0)
    assert (there.send_posted, there.ready, there.start, there.end) == (1.0, 1.0, 1.0, 1.75)
    assert (back.source, back.target, back.kind, back.stage, back.start, back.end) == (1, 0, "B", 0, 4.75, 5.5)
    assert result.volume() == {(0, 1): (1, 4.0), (1, 0): (1, 4.0)}


def test_waits_are_attributed_to_their_cause():
    result = simulated("gpipe", 2, 1, 1, network=Network(4.0, link=Link(latency=0.25, bandwidth=8.0)))
    first, second = result.waits
    # Rank 1 ends with its gradient on the way. Rank 0 waits from 1 to 5.5, the last 0.75 of it for the transfer.
    assert (second.peer_late, second.queued, second.transfer, second.release) == (1.0, 0.0, 0.75, 0.75)
    assert (first.queued, first.transfer) == (0.0, 0.75)
    assert first.total == 4.5


def test_links_and_gradient_sizes_may_differ():
    network = Network(4.0, gradient_bytes=8.0, link=Link(bandwidth=4.0), links={(1, 0): Link(bandwidth=2.0)})
    there, back = simulated("gpipe", 2, 1, 1, network=network).transfers
    assert there.end - there.start == 1.0
    assert back.end - back.start == 4.0


def test_transfers_on_one_link_take_turns():
    """P=2, V=2: activations (chunk 0) and gradients (chunk 1) share the direction 0 -> 1, on channels of their own."""
    result = simulated("interleaved_1f1b", 2, 2, 8, network=Network(1.0, link=Link(bandwidth=0.8)))
    busy_until = {}
    for t in sorted(result.transfers, key=lambda t: t.start):
        assert t.start >= busy_until.get((t.source, t.target), 0.0)
        busy_until[(t.source, t.target)] = t.end
    assert any(t.start > t.ready for t in result.transfers)


def test_queueing_is_not_attributed_to_the_peer():
    """Everything on one queue: a message that is posted behind another one waits for it, not for its peer."""
    result = simulated("1f1b", 2, 1, 8, network=Network(1.0, link=Link(bandwidth=0.5)), channels=SHARED)
    assert sum(w.queued for w in result.waits) > 0


def test_opposite_directions_do_not_disturb_each_other():
    result = simulated("1f1b", 2, 1, 8, network=Network(1.0, link=Link(bandwidth=2.0)))
    assert all(t.start == t.ready for t in result.transfers)


@pytest.mark.parametrize(
    ("first", "gloo", "size", "there"),
    [
        ("SEND_F0.0 SEND_F0.1 RECV_B0.0", False, 1.0, (4.0, 6.0)),
        ("SEND_F0.0 SEND_F0.1 RECV_B0.0", True, 1.0, (5.0, 7.0)),  # heard of when SEND_F0.1 has left, at 5
        ("SEND_F0.0 RECV_B0.0 SEND_F0.1", True, 1.0, (4.0, 6.0)),  # heard of when SEND_F0.0 has left, at 3
        ("SEND_F0.0 SEND_F0.1 RECV_B0.0", True, GLOO_DETACHED_BYTES, (4.0, 6.0)),  # heard of on a connection of its own
    ],
)
def test_on_gloo_a_receive_is_announced_behind_data_in_the_other_direction(first, gloo, size, there):
    """Two ranks, transfers of 2, F 0.5, B 1: rank 0's two sends leave from 1 to 5, rank 1's gradient is ready at 4."""
    programs = (
        f"F0.0 F0.1 {first} WAIT_B0.0 FREE_F0.0 FREE_F0.1 B0.0",
        "RECV_F0.0 RECV_F0.1 WAIT_F0.0 F0.0 B0.0 SEND_B0.0 WAIT_F0.1 FREE_B0.0",
    )
    plan = build_plan(PlanSpec("gpipe", 2, 1, 2))
    plan = with_programs(plan, *programs)
    network = Network(size, link=Link(bandwidth=size / 2), gloo=gloo)
    result = simulate(plan, StageCosts.uniform(2, 0.5, 0.25, 0.25), network)
    back = next(t for t in result.transfers if t.kind == "B")
    assert (back.send_posted, back.receive_posted) == (4.0, 1.0)
    assert (back.start, back.end) == there
    assert result.waits[0].queued == there[0] - 4.0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_on_gloo_every_message_arrives_and_none_earlier_than_both_ends_and_the_wire_allow(schedule, policy):
    v = UNIT_COSTS[schedule]
    network = Network(1.0, link=Link(bandwidth=0.7), gloo=True)
    result = simulated(schedule, 2, v, 8, network=network, policy=policy)
    free = {}
    for t in sorted(result.transfers, key=lambda t: t.start):
        assert t.start >= max(t.send_posted, t.receive_posted, free.get((t.source, t.target), 0.0))
        free[(t.source, t.target)] = t.end
    assert len(result.transfers) == 2 * 8 * (2 * v - 1)


def test_hand_offs_on_one_rank_cost_nothing():
    plan = lowered_plan(PlanSpec("breadth_first", 1, 3, 4))
    result = simulate(plan, StageCosts.uniform(3), Network(1.0, link=Link(5.0, 1e-3)))
    assert result.makespan == 3 * 4 * 3
    assert len(result.transfers) == 0


def test_batches_leave_as_a_whole():
    """Under ``batched`` a rank goes on only when every member of its batch is done; overlap is never slower."""
    network = Network(1.0, link=Link(bandwidth=2.0))
    spans = {p: simulated("interleaved_1f1b", 4, 2, 8, network=network, policy=p).makespan for p in (OVERLAP, BATCHED)}
    assert spans[OVERLAP] < spans[BATCHED]


def test_shared_channels_are_one_queue_both_ways():
    network = Network(1.0, link=Link(bandwidth=2.0))
    result = simulated("1f1b", 2, 1, 8, network=network, channels=SHARED)
    ordered = sorted(result.transfers, key=lambda t: t.start)
    assert all(a.end <= b.start for a, b in pairwise(ordered))


def test_a_slow_stage_lengthens_the_step():
    costs = StageCosts.per_stage([1, 1, 2, 1], [1, 1, 2, 1], [1, 1, 2, 1])
    result = simulated("1f1b", 4, 1, 32, costs)
    assert result.idle.index(min(result.idle)) == 2
    assert result.makespan >= 32 * 6


def test_split_backward_costs_its_halves():
    order = placed(Placement("loop", 1, 1), 0, "F0.0 I0.0 W0.0 F0.1 B0.1")
    plan = Plan(PlanSpec("gpipe", 1, 1, 2), Placement("loop", 1, 1), (order,), (order,))
    result = simulate(plan, StageCosts.per_stage([1], [10], [100], [1000]))
    assert [e.end - e.start for e in result.events(0)] == [1, 10, 100, 1, 1000]
    assert result.peak_in_flight() == (1,)


def test_an_evaluation_has_nothing_in_flight():
    plan = build_plan(PlanSpec("1f1b", 4, 1, 8, forward_only=True))
    assert simulate(plan, StageCosts.uniform(4)).peak_in_flight() == (0, 0, 0, 0)


def test_simulate_refuses_a_plan_that_hangs_and_names_the_cycle():
    broken = edited(edited(build_plan(PlanSpec("1f1b", 2, 1, 2)), 1, "drop SEND_B0.0"), 1, "drop FREE_B0.0")
    with pytest.raises(PlanError, match="rank 0"):
        simulate(broken, StageCosts.uniform(2))


def test_crossing_messages_are_refused():
    broken = edited(build_plan(PlanSpec("gpipe", 2, 1, 2)), 0, "swap SEND_F0.0 SEND_F0.1")
    with pytest.raises(PlanError, match="messages between them cross"):
        simulate(broken, StageCosts.uniform(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: simulated("1f1b", 4, 1, 4, StageCosts.uniform(3)), "costs are given for 3 stages; the plan has 4"),
        (lambda: StageCosts.uniform(2, forward=-1), "forward time of stage 0 is -1"),
        (lambda: StageCosts.uniform(2, weight=math.nan), "time of stage 0 is nan"),
        (lambda: StageCosts.per_stage([1, 1], [1], [1]), "backward"),
        (lambda: Link(bandwidth=0), "bandwidth of a link is 0"),
        (lambda: Link(latency=-1), "latency of a link is -1"),
        (lambda: Network(activation_bytes=-1), "activation_bytes is -1"),
    ],
)
def test_bad_costs_are_refused(build, message):
    with pytest.raises(PlanError, match=message):
        build()


NAMES = [name for name, family in SCHEDULES.items() if family.search is None]


def plan_of(name, size=4, microbatches=12):
    return build_plan(PlanSpec(name, size, SCHEDULES[name].chunks or 2, microbatches))


def unit_costs(plan):
    """F = B = W = 1 for a rank's share of the model."""
    return StageCosts.uniform(plan.spec.pipeline_size).regrouped(plan.placement.num_stages)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", ["zb_h2", "zb_v"])
def test_the_papers_zero_bubble_is_that_of_steps_in_a_row(name, size):
    """arXiv 2401.10241, sections 2.2, 4 and 6: no bubble with the bypass; without it P - 1 forwards of zb_h2's step."""
    microbatches = 3 * size
    plan = plan_of(name, size, microbatches)
    alone, steady = simulate(plan, unit_costs(plan)), steady_step(plan, unit_costs(plan))
    assert (steady.period, steady.bubble_share) == (3 * microbatches, 0.0)
    assert counts_on_bypass(alone)
    assert longest_span(alone) == 3 * microbatches
    assert alone.makespan == 3 * microbatches + (size - 1) * (1 if name == "zb_h2" else 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("latency", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_gains_by_the_bypass_where_it_counts_on_it(name, latency):
    plan, network = plan_of(name), Network(link=Link(latency))
    alone, steady = simulate(plan, unit_costs(plan), network), steady_step(plan, unit_costs(plan), network)
    assert steady.busy == pytest.approx(alone.busy)
    assert steady.period <= alone.makespan * (1 + 1e-9)
    assert counts_on_bypass(alone) == (steady.period < alone.makespan * (1 - 1e-9))


def test_the_period_is_found_where_the_first_steps_are_not_steady():
    """Two ranks at different speeds: the slow one sets the pace, once the fast one's lead is used up."""
    plan = plan_of("zb_h2", 2, 3)
    costs = StageCosts.per_stage((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    steady = steady_step(plan, costs)
    many = simulate(in_a_row(plan, 40), costs).makespan - simulate(in_a_row(plan, 20), costs).makespan
    assert steady.period == pytest.approx(many / 20)
    assert steady.period < simulate(plan, costs).makespan


def test_messages_of_steps_in_a_row_do_not_cross():
    plan = in_a_row(plan_of("zb_v", 2, 4), 3)
    assert {at.mb for order in plan.orders for at in order} == set(range(plan.spec.num_microbatches)) == set(range(12))
    check_rendezvous(plan, ())


def test_an_entry_that_is_over_is_not_kept() -> None:
    """Memory grows with the plan's columns of times, not with what was posted: the device's rules of a default plan let
    any instruction wait, and the simulator has none that does.
    """
    left = []
    for m in (8, 64):
        plan = build_plan(PlanSpec("interleaved_1f1b", 4, 2, m))
        run = SimulatedRun(plan, StageCosts.uniform(8).placed(plan.placement), Network(), (ANY_WAIT,))
        run.run()
        gc.collect()
        left.append(sum(type(one) is Entry for one in gc.get_objects()))
        del run
    assert left[0] == left[1]

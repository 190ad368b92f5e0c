"""The lower bound: no simulated plan is shorter, and a best plan, where it is known, reaches it."""

import math
import random
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.costs.stage_costs import Link, MemoryModel, Network, StageCosts
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.plan.ir.spec import CHANNELS, POLICIES, PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner.bound import Job, bound_of, least_end, lower_bound
from megatron_pp.planner.naive import naive_orders
from megatron_pp.planner.plan_search import peak_memory
from testkit.sweeps import EXHAUSTIVE

FAMILIES = [family for family in SCHEDULES.values() if family.search is None]


def random_times(rng, stages):
    kind = rng.random()
    if kind < 0.3:
        return (1.0,) * stages
    return tuple(rng.choice([0.0, 1.0, 2.0]) if kind < 0.5 else rng.uniform(0.0, 3.0) for _ in range(stages))


def random_network(rng):
    link = Link(rng.choice([0.0, 0.5, 2.0]), rng.choice([math.inf, 1.0, 0.3]))
    return Network(rng.choice([0.0, 1.0, 2.0]), rng.choice([None, 0.5]), link, gloo=rng.random() < 0.2)


def memory_of(plan, rng):
    """The peak memory of the plan itself, as the limit."""
    stages = plan.placement.num_stages
    equal = rng.random() < 0.5
    forward = tuple(1.0 if equal else rng.choice([1.0, 2.0, rng.random()]) for _ in range(stages))
    free = MemoryModel((), forward, tuple(rng.choice([0.0, rng.random(), 1.0]) * kept for kept in forward))
    peaks = (peak_memory(order, plan.placement.stages[r], free) for r, order in enumerate(plan.orders))
    return replace(free, limits=tuple(peaks))


def naive_plan(microbatches):
    spec = PlanSpec("naive", 3, 1, microbatches, split_backward=False)
    return lowered(spec, Placement(LOOP, 3, 1), naive_orders(spec.shape))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_simulated_plan_is_below_the_bound(family, policy):
    rng, simulated = random.Random(f"{family.name} {policy}"), 0
    for _ in range(12 if EXHAUSTIVE else 3):
        spec = PlanSpec(
            family.name,
            rng.randint(1, 6),
            family.chunks or rng.randint(1, 3),
            rng.randint(1, 14),
            policy=policy,
            channels=rng.choice(CHANNELS),
            forward_only=rng.random() < 0.1,
            overlap_pairs=rng.random() < 0.3,
            split_backward=rng.random() < 0.8,
            slices=rng.randint(2, 4) if family.sliced and rng.random() < 0.7 else 1,
        )
        try:
            plan = lowered_plan(spec)
            verify(plan)
        except PlanError:  # sizes, or a policy, that the family does not have
            continue
        stages = plan.placement.num_stages
        shares = rng.choice([(1.0, 1.0), (0.0, 0.0), (0.3, 0.5)])
        times = [random_times(rng, stages) for _ in range(4)]
        layer = (rng.random(), rng.random(), rng.random()) if rng.random() < 0.5 else (0.0, 0.0, 0.0)
        costs = StageCosts(*times, pair_sends=shares, attention=0.5 if spec.num_parts > 1 else 0.0, output_layer=layer)
        network, limited = random_network(rng), spec.num_parts == 1 and not spec.forward_only
        if plan.placement.barriers:  # the simulator does not have its collectives on gloo
            network = replace(network, gloo=False)
        bound = bound_of(plan, costs, network, memory_of(plan, rng) if limited else None)
        assert bound.step <= simulate(plan, costs, network).makespan * (1 + 1e-9), (spec, costs, network, bound.terms)
        simulated += 1
    assert simulated


def test_a_single_microbatch_takes_the_critical_path():
    costs = StageCosts.per_stage((1.0, 2.0, 3.0), (2.0, 3.0, 1.0), (1.0, 1.0, 1.0), (2.5, 4.0, 2.0))
    plan, network = naive_plan(1), Network(link=Link(0.25))
    bound = bound_of(plan, costs, network)
    assert (bound.reason, bound.step) == ("critical path", 6.0 + 8.5 + 4 * 0.25)
    assert bound.step == simulate(plan, costs, network).makespan


def test_zero_bubble_is_the_work_of_the_last_rank_after_its_warm_up():
    plan = lowered_plan(PlanSpec("zb_h1", 4, 1, 16))
    costs = StageCosts.uniform(4)
    bound = bound_of(plan, costs)
    assert bound.step == simulate(plan, costs).makespan == 3 + 3 * 16
    assert bound.reason == "work of rank 3"


def test_whole_backwards_add_the_drain_of_the_last_rank():
    plan = lowered_plan(PlanSpec("1f1b", 4, 1, 16, split_backward=False))
    costs = StageCosts.uniform(4)
    bound = bound_of(plan, costs)
    assert bound.step == simulate(plan, costs).makespan == 3 + 3 * 16 + 3 * 2
    assert bound.reason == "work of rank 3"


def test_slow_links_take_turns():
    """All activations cross the only link, between the end of the first forward and the start of the last one."""
    plan = lowered_plan(PlanSpec("gpipe", 2, 1, 8, forward_only=True))
    network = Network(activation_bytes=3.0, link=Link(bandwidth=1.0))
    bound = bound_of(plan, StageCosts.uniform(2), network)
    assert bound.step == simulate(plan, StageCosts.uniform(2), network).makespan == 1 + 8 * 3 + 1
    assert bound.reason == "link 0 to 1"


def test_memory_for_one_microbatch_makes_a_round_trip_of_each():
    placement, costs, network = Placement(LOOP, 3, 1), StageCosts.uniform(3), Network(link=Link(0.5))
    memory = MemoryModel.in_chunks(placement, 1.0)
    bound = lower_bound(placement, 5, costs, network, memory, split=False)
    plan = naive_plan(5)
    assert bound.step == simulate(plan, costs, network).makespan == 5 * (3 * 3 + 4 * 0.5)
    assert bound.reason.startswith("memory")


def test_memory_that_is_free_after_the_input_gradient_lets_the_next_forward_go():
    """F and I of both ranks take 4 slots, and microbatches run one after another. All W but the last fit into the
    waits."""
    placement = Placement(LOOP, 2, 1)
    memory = MemoryModel((1.0, 9.0), (1.0, 1.0), (0.0, 0.0))
    assert lower_bound(placement, 3, StageCosts.uniform(2), memory=memory).step == 3 * 4 + 1
    kept = replace(memory, weight=(1.0, 1.0))  # now W has to come before the next forward
    assert lower_bound(placement, 3, StageCosts.uniform(2), memory=kept).step == 3 * 5


def test_chunks_share_the_memory_of_their_rank():
    """One microbatch in both chunks fills a rank. So rank 0 ends a microbatch before the second chunk of the next one.
    The memory of both chunks must be added up; no chunk alone gives this bound.
    """
    placement, costs = Placement(V_SHAPE, 2, 2), StageCosts.uniform(4)
    loose = lower_bound(placement, 8, costs, memory=MemoryModel.in_chunks(placement, 8.0))
    tight = lower_bound(placement, 8, costs, memory=MemoryModel.in_chunks(placement, 2.0))
    assert loose.step == lower_bound(placement, 8, costs).step
    # Trips of stages 0 to 3 are 8, 6, 4, 2 slots: rank 0 holds (8 + 2) slots of memory a microbatch, 2 at a time.
    assert dict(tight.terms)["memory of rank 0"] >= 8 * (8 + 2) / 2


@pytest.mark.parametrize(
    ("family", "chunks", "transfer", "room"), [("zb_h1", 1, 0.5, 4.0), ("zb_v", 2, 1.0, 8.0), ("v_half", 2, 0.0, 6.0)]
)
def test_families_whose_memory_allows_no_shorter_step(family, chunks, transfer, room):
    """Each rank waits for its first backward with its memory full. No other order has less of this idle time."""
    plan, network = lowered_plan(PlanSpec(family, 4, chunks, 12)), Network(link=Link(transfer))
    costs, memory = StageCosts.uniform(4 * chunks), MemoryModel.in_chunks(plan.placement, room)
    step = simulate(plan, costs, network).makespan
    assert bound_of(plan, costs, network, memory).step == step > bound_of(plan, costs, network).step


TIGHT = {  # placement, memory, and the optimum (proven by a solver) of 3 microbatches with F = I = W = 1
    "alone": (Placement(V_SHAPE, 2, 2), MemoryModel((9.0, 2.0), (1.0,) * 4, (1.0,) * 4), 25),
    "later chunk": (Placement(LOOP, 2, 2), MemoryModel((8.0, 3.6), (1.0, 1.0, 3.0, 2.0), (0.0,) * 4), 20),
    "waiting W": (Placement(LOOP, 3, 1), MemoryModel((18.0, 2.0, 1.5), (2.0, 2.0, 1.0), (1.0, 1.0, 0.5)), 17),
}


@pytest.mark.parametrize(("placement", "memory", "step"), TIGHT.values(), ids=TIGHT)
def test_the_bound_counts_microbatches_that_do_not_fit_together(placement, memory, step):
    """If a microbatch fills rank 1 from its first forward there, rank 1 is idle while other ranks run this microbatch.
    A microbatch that continues in a second chunk needs room for both chunks. While the memory of a waiting W leaves no
    room, no forward runs.
    """
    assert lower_bound(placement, 3, StageCosts.uniform(placement.num_stages), memory=memory).step == step


# Steps of the best plans for the random problems below. CP-SAT has found them, and proven that no plan is shorter.
OPTIMA = (24, 28, 66, 56, 33, 31, 17, 60, 38, 36, 24, 54, 39, 26, 36, 33, 32, 19, 24, 54, 18, 38, 22, 23)


def test_no_proven_optimum_is_below_the_bound():
    rng, reached = random.Random(7), 0
    for optimum in OPTIMA:
        kind, size, chunks = rng.choice([(LOOP, 1, 2), (LOOP, 2, 1), (LOOP, 3, 1), (V_SHAPE, 2, 2), (LOOP, 2, 2)])
        placement = Placement(kind, size, chunks)
        stages = range(placement.num_stages)
        costs = StageCosts.per_stage(*([rng.randint(1, 3) for _ in stages] for _ in range(3)))
        kept = tuple(rng.choice([1.0, 2.0, 3.0]) for _ in stages)
        late = tuple(rng.choice([0.0, 0.5, 1.0]) * one for one in kept)
        room = tuple(rng.choice([1.0, 1.25, 1.5, 2.0]) * sum(kept[s] for s in row) for row in placement.stages)
        microbatches, network = rng.randint(2, 4), Network(link=Link(rng.choice([0.0, 0.5])))
        bound = lower_bound(placement, microbatches, costs, network, MemoryModel(room, kept, late))
        assert bound.step <= optimum * (1 + 1e-9), (placement, bound)
        reached += bound.step == pytest.approx(optimum)
    assert reached == 21


def test_more_memory_or_faster_parts_never_raise_the_bound():
    rng = random.Random(5)
    for _ in range(25):
        placement = Placement(rng.choice([LOOP, V_SHAPE]), rng.randint(2, 5), 2)
        stages = placement.num_stages
        times = [tuple(rng.uniform(0.1, 2.0) for _ in range(stages)) for _ in range(3)]
        link, limit = rng.uniform(0.0, 1.0), rng.uniform(2.0, 12.0)

        def bound(scale=1.0, wire=link, room=limit, times=times, placement=placement):
            costs = StageCosts.per_stage(*([scale * t for t in line] for line in times))
            network, memory = Network(link=Link(wire)), MemoryModel.in_chunks(placement, room)
            return lower_bound(placement, 7, costs, network, memory).step

        most = bound() * (1 + 1e-12)  # sums of other paths round differently
        assert bound(room=limit + 1) <= most
        assert bound(wire=link / 2) <= most
        assert bound(scale=0.9) <= most


def test_the_one_machine_bound_is_the_worst_set_of_jobs():
    rng = random.Random(3)
    for _ in range(60):
        jobs = [Job(*(rng.randint(0, 9) for _ in range(3))) for _ in range(rng.randint(1, 7))]
        sets = ([job for i, job in enumerate(jobs) if chosen >> i & 1] for chosen in range(1, 1 << len(jobs)))
        worst = max(min(j.head for j in s) + sum(j.time for j in s) + min(j.tail for j in s) for s in sets)
        assert least_end(jobs) == worst, jobs
    assert least_end([]) == 0.0


def test_a_limit_below_one_microbatch_is_an_error():
    placement = Placement(LOOP, 2, 2)
    with pytest.raises(PlanError, match=r"one microbatch alone needs 2 of memory on rank 0, but the limit is 1\.5"):
        lower_bound(placement, 4, StageCosts.uniform(4), memory=MemoryModel.in_chunks(placement, 1.5))
    with pytest.raises(PlanError, match="costs are given for 3 stages; the placement has 4"):
        lower_bound(placement, 4, StageCosts.uniform(3))


def test_the_excess_of_a_step_is_its_share_above_the_bound():
    placement = Placement(LOOP, 2, 1)
    bound = lower_bound(placement, 4, StageCosts.uniform(2))
    assert bound.excess(1.25 * bound.step) == pytest.approx(0.25)
    assert bound.excess(bound.step) == 0.0
    assert lower_bound(placement, 4, StageCosts.uniform(2, 0.0, 0.0, 0.0)).excess(0.0) == 0.0

"""The automatic scheduler keeps to the memory limit. It is never worse than the named schedules, and sometimes
better."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_pp.errors import PlanError
from megatron_pp.p2p_communication import P2PCommunicator
from megatron_pp.plan.builder import build_plan, lowered_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import Link, MemoryModel, Network, StageCosts
from megatron_pp.plan.ir.placement import V_SHAPE, Placement
from megatron_pp.plan.ir.spec import BATCHED, PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Shape
from megatron_pp.plan.orders.list_scheduler import Problem, Rules, schedule
from megatron_pp.plan.orders.v import pattern_slots, v_half_offsets
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner import auto
from megatron_pp.planner.bound import lower_bound
from megatron_pp.planner.plan_search import SearchResult, peak_memory
from megatron_pp.runtime.arguments import StepInputs
from megatron_pp.runtime.own_host import OwnHost
from megatron_pp.runtime.run_step import prepared
from megatron_pp.testing.memory_transport import MemoryNetwork
from megatron_pp.testing.threads import ThreadGroup
from megatron_pp.testing.toy import toy_chunks, toy_config, toy_forward_step
from testkit.sweeps import EXHAUSTIVE


def search(
    name: str, size: int, chunks: int, m: int, measured: Measured | None = None, **fields: object
) -> SearchResult:
    return auto.found(PlanSpec(name, size, chunks, m, measured=measured, **fields))  # type: ignore[arg-type]


@pytest.mark.slow
@settings(max_examples=100 if EXHAUSTIVE else 5)
@given(data=st.data())
def test_never_worse_than_the_best_named_family_under_the_limit(data: st.DataObject) -> None:
    name, chunks = data.draw(st.sampled_from([("auto", 1), ("auto", 2), ("auto_v", 2)]))
    size, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    stages = size * chunks
    times = st.lists(st.floats(0.1, 3.0), min_size=stages, max_size=stages).map(tuple)
    measured = Measured(
        data.draw(times),
        data.draw(times),
        data.draw(times),
        transfer=data.draw(st.floats(0.0, 1.0)),
        memory_limit=float(data.draw(st.integers(2 * size, 4 * size))) * chunks,
        weight_activation=data.draw(st.floats(0.1, 1.0)),
    )
    result = search(name, size, chunks, m, measured)
    named = [candidate.makespan for candidate, fits in result.named if fits]
    assert named, "a limit of 2 P microbatches fits at least one"
    assert result.best.makespan <= min(named)
    assert max(result.best.peaks) <= measured.memory_limit * (1 + 1e-6)  # type: ignore[operator]
    verify(result.best.plan)
    again = simulate(result.best.plan, measured.costs(stages), measured.network()).makespan
    assert again == result.best.makespan


def test_rounding_makes_no_named_family_shorter_than_the_best() -> None:
    """All families take the same time. Summed in another order, one of them is shorter by rounding."""
    times = (1.8901932012278273, 1.0), (1.0, 1.0), (1.0, 1.0)
    result = search("auto", 1, 2, 6, Measured(*times, memory_limit=4.0, weight_activation=1.0))
    assert result.best.makespan <= min(candidate.makespan for candidate, fits in result.named if fits)


@pytest.mark.slow
def test_finds_better_than_v_min_in_v_mins_memory() -> None:
    """At P = 8, V-Min is idle for 27 chunk units. The search fills its warm-up and cool-down, with the same memory of 8
    chunks."""
    result = search("auto_v", 8, 2, 16, Measured(memory_limit=8.0))
    v_min = next(c for c, _ in result.named if c.name == "v_min")
    assert v_min.makespan == 6 * 16 + 27
    assert result.best.makespan <= 6 * 16 + 23
    assert max(result.best.peaks) <= 8


@pytest.mark.slow
def test_finds_interleaving_without_its_extra_memory() -> None:
    result = search("auto", 4, 2, 8)
    assert result.best.makespan == 6 * 8 + 3
    assert max(result.best.peaks) <= 8 < max(next(c for c, _ in result.named if c.name == "interleaved_zb").peaks)


@pytest.mark.slow
def test_measured_times_and_transfers_gain_from_the_search() -> None:
    """With a memory of 6, between ZB-H1 (4) and ZB-H2 (7), the search finds a shorter plan than the named orders.

    With two receives of a channel posted ahead the step would be 28.9, but such a plan hangs in one hardware queue.
    """
    measured = Measured(1.0, 1.3, 0.8, transfer=0.2, memory_limit=6.0)
    result = search("auto", 4, 1, 8, measured)
    assert min(c.makespan for c, fits in result.named if fits) == pytest.approx(31.7)
    assert result.best.makespan <= 29.1 + 1e-6


def test_finds_the_optimum_of_a_small_uneven_case() -> None:
    """A solver has proven that no plan is shorter than 22.6."""
    times = (0.85, 1.3, 0.6), (0.9, 1.4, 0.55), (0.7, 1.0, 0.5)
    assert search("auto", 3, 1, 5, Measured(*times, transfer=0.3, memory_limit=2.5)).best.makespan <= 1.02 * 22.6


@pytest.mark.slow
def test_messages_do_not_hold_up_an_order_that_is_at_the_bound() -> None:
    """With receives posted one slot ahead and sends released one slot later, as in other plans, it takes 32.65."""
    times = (1.5, 1.4, 0.65, 1.0), (1.55, 1.55, 0.55, 1.1), (1.15, 0.95, 0.45, 0.6)
    measured = Measured(*times, transfer=0.9, memory_limit=5.3575, activation=times[0])
    best = search("auto", 4, 1, 4, measured).best
    placement = best.plan.placement
    conditions = measured.costs(4), measured.network(), measured.memory(placement)
    assert best.makespan == pytest.approx(lower_bound(placement, 4, *conditions).step)
    verify(best.plan)


def test_a_limit_per_rank_is_kept_on_each() -> None:
    result = search("auto", 4, 1, 12, Measured(memory_limit=(3.0, 4.0, 5.0, 6.0)))
    assert all(peak <= limit for peak, limit in zip(result.best.peaks, (3, 4, 5, 6), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "chunks", "m"), [(1, 3, 4), (2, 2, 5), (3, 3, 5)])
def test_groups_larger_than_the_pipeline_cost_neither_memory_nor_time(size: int, chunks: int, m: int) -> None:
    """Named orders of such groups need more than the memory of 1F1B, which is the limit if none is given."""
    grouped, usual = (search("auto", size, chunks, m, group_size=group) for group in (2 * size, size))
    assert not any(fits for found, fits in grouped.named if not SCHEDULES[found.name].small_groups)
    assert max(grouped.best.peaks) <= size * chunks
    assert grouped.best.makespan <= usual.best.makespan
    verify(grouped.best.plan)


@pytest.mark.slow
@settings(max_examples=100 if EXHAUSTIVE else 6)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_a_memory_limit_of_one_microbatch_is_enough(size: int, chunks: int, m: int, wave: bool) -> None:
    """No plan needs less, with groups of any size."""
    name, chunks = ("auto_v", 2) if wave else ("auto", chunks)
    result = search(name, size, chunks, m, Measured(memory_limit=float(chunks)), group_size=2 * size)
    assert max(result.best.peaks) == chunks
    verify(result.best.plan)


def test_a_memory_limit_below_one_microbatch_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match=r"but the limit is 2\.5; one microbatch alone needs 3 on rank 0"):
        search("auto", 2, 3, 4, Measured(memory_limit=2.5))


def test_an_impossible_limit_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"needs least: \d.* but the limit is 0.5"):
        search("auto", 4, 1, 8, Measured(memory_limit=0.5))


@pytest.mark.slow
def test_plans_are_built_through_the_registry_and_cached() -> None:
    spec = PlanSpec("auto_v", 3, 2, 7, policy=BATCHED, measured=Measured(1.0, 1.5, 0.5, transfer=0.1))
    assert build_plan(spec) is build_plan(PlanSpec(**{name: getattr(spec, name) for name in spec.__dataclass_fields__}))


def test_orders_of_a_bare_shape_use_equal_times() -> None:
    orders = SCHEDULES["auto"].orders(Shape(4, 1, 8, 4))
    memory = MemoryModel.in_chunks(Placement("loop", 4, 1), 4.0)
    assert [peak_memory(order, [rank], memory) for rank, order in enumerate(orders)] <= [4.0] * 4


def test_the_scheduler_reports_what_cannot_be_done() -> None:
    placement = Placement("v", 2, 2)
    slots = [pattern_slots(v_half_offsets(2, rank), microbatches=3) for rank in range(2)]
    problem = Problem(placement, 3, MemoryModel.in_chunks(placement, 1.0), StageCosts.uniform(4))
    assert schedule(problem, slots, Rules()) is None


def test_patience_keeps_a_weight_gradient_from_holding_up_what_others_wait_for() -> None:
    """W takes 10, and the next gradient arrives 1 after the rank is free. A patient rank waits for 1 instead of
    delaying the gradient by 10.
    """
    placement = Placement("loop", 2, 1)
    costs = StageCosts.per_stage([1, 1], [2, 1], [10, 10])
    problem = Problem(placement, 2, MemoryModel.in_chunks(placement, 9.0), costs, transfer=1.0)
    one_f_one_b = [
        {(op, 0, mb): 3 * mb + (rank if op == "F" else 4 - rank) for op in "FB" for mb in range(2)} for rank in range(2)
    ]
    results = [schedule(problem, one_f_one_b, Rules(patience=patience)) for patience in (0.0, 1.0)]
    assert results[0] is not None
    assert results[1] is not None
    assert results[1].makespan <= results[0].makespan


@pytest.mark.parametrize("seed", range(40))
def test_a_scheduled_order_runs_in_its_stated_time_within_the_memory_limit(seed: int) -> None:
    rng = random.Random(seed)
    size, count, unit = rng.randint(2, 4), rng.randint(1, 7), rng.choice([0.01, 1.0, 100.0])
    placement = Placement(V_SHAPE, size, 2)
    times = ([unit * rng.choice([1.0, rng.uniform(0.1, 2.0)]) for _ in range(2 * size)] for _ in range(3))
    costs = replace(StageCosts.per_stage(*times), microbatches=tuple(rng.choice([0.5, 1.0, 2.0]) for _ in range(count)))
    kept = tuple(rng.choice([1.0, rng.random()]) for _ in range(2 * size))
    memory = MemoryModel(
        limits=tuple(rng.uniform(1.5, 3.0) * (kept[rank] + kept[2 * size - 1 - rank]) for rank in range(size)),
        forward=kept,
        weight=tuple(rng.choice([0.0, 0.5, 1.0]) * one for one in kept),
    )
    latency = unit * rng.choice([0.0, 0.3])
    problem = Problem(placement, count, memory, costs, 9 * unit, dict.fromkeys(permutations(range(size), 2), latency))
    slots = [pattern_slots(v_half_offsets(size, rank), count) for rank in range(size)]
    rules = Rules(rng.choice([0.0, 2.0, 5.0]), rng.choice([0.0, 1.0]), rng.random() < 0.7, rng.choice([0.0, 1.0]))
    found = schedule(problem, slots, rules)
    if found is None:  # these rules do not suffice for the limit
        return
    spec = PlanSpec("zb_v", size, 2, count, lookahead=50, release_after=50)  # no rank waits for the release of a send
    plan = lowered(spec, placement, found.orders)
    verify(plan)
    taken = simulate(plan, costs, Network(link=Link(latency))).makespan
    assert taken == pytest.approx(found.makespan) or (rules.patience and taken < found.makespan)
    for rank, order in enumerate(found.orders):
        assert peak_memory(order, placement.stages[rank], memory) <= memory.limits[rank] * (1 + 1e-9)
    assert schedule(problem, slots, rules, found.makespan) == found
    assert schedule(problem, slots, rules, found.makespan * 0.999) is None


# -- announcements and errors ---


def test_a_long_search_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, said = PlanSpec("auto", 2, 1, 14), list[str]()  # more than 6 P microbatches: one search within another
    lowered_plan(spec, said.append)
    assert said == []
    monkeypatch.setattr("megatron_pp.planner.plan_search._PATIENCE", -1.0)
    lowered_plan(spec, said.append)
    assert len(said) == 1
    assert "schedule auto: the search for the best order of P=2, V=1, M=14 takes more than" in said[0]


def test_the_first_rank_of_the_job_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("megatron_pp.runtime.step.warn_once", said.append)
    network = MemoryNetwork(3)
    for rank in range(3):
        config = toy_config()
        inputs = StepInputs(
            False,
            forward_step_func=toy_forward_step,
            data_iterator=None,
            model=toy_chunks(Placement("loop", 3, 1), rank, config)[0],
            num_microbatches=2,
            seq_length=4,
            micro_batch_size=1,
            p2p_communicator=P2PCommunicator(ThreadGroup(rank, 3), config, network.transport(rank)),
        )
        prepared(OwnHost(inputs, alone=False)).announce(f"rank {rank}")
    assert said == ["rank 0"]

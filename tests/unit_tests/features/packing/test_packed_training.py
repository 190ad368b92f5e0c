"""Microbatches of different lengths, token counts and context sizes in a step: numbers of one process, no hang."""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron_pp.errors import PipelineError, PipelineMismatchError, PlanError, ScheduleInputError
from megatron_pp.features.packing.packing import PackedStep, PackingRules, packed
from megatron_pp.features.packing.step_ahead import NextStep
from megatron_pp.features.packing.steps import PackedSteps
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.toy import ToyResult, merged
from megatron_pp.weight_grad import split_weight_grad
from testkit.sweeps import EXHAUSTIVE
from testkit.thread_runs import packings
from testkit.thread_runs.packings import SCHEDULES, SIZE, PackedRank, drawn, one_process, run_pipelines, summed


def trained(pipelines: int, num_chunks: int, step: PackedStep, size: int = SIZE, **fields: Any) -> list[ToyResult]:
    """Each pipeline's losses and gradients after one step."""
    ranks = run_pipelines(pipelines, size, num_chunks, lambda rank: rank.step(rank.model(), step), **fields)
    return [merged(one) for one in ranks]


def expected(step: PackedStep, stages: int) -> tuple[ToyResult, list[list[float]]]:
    """The result of one process that runs all packs, slot by slot, and the losses of each slot's packs."""
    packs = [pack for slot in step.slots for pack in slot.packs]
    found = one_process(packs, stages)
    losses = iter(found.losses)
    return found, [[next(losses) for _ in slot.packs] for slot in step.slots]


def check(seed: int) -> None:
    one = drawn(seed)
    found = trained(one.pipelines, one.num_chunks, one.step, **one.fields)
    if one.pipelines > 1:
        assert_sums_are_equal(found, one.step, SIZE * one.num_chunks)
        return
    alone, _ = expected(one.step, SIZE * one.num_chunks)
    assert found[0].difference(alone) == 0, one.fields


def assert_sums_are_equal(found: list[ToyResult], step: PackedStep, stages: int) -> None:
    """Sums over pipelines are those of one process, but for rounding."""
    alone, losses = expected(step, stages)
    total = summed(found)
    assert total.losses == pytest.approx([sum(one) for one in losses], rel=1e-12)
    total.losses = alone.losses
    largest = max(float(grad.abs().max()) for grad in alone.grads.values())
    assert total.difference(alone) < 1e-12 * largest


SAMPLE = 24
CHUNK = 50


@pytest.mark.parametrize("seed", range(SAMPLE))
def test_random_packings_at_four_ranks_neither_hang_nor_change_a_number(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.skipif(not EXHAUSTIVE, reason="a sample runs; all with MEGATRON_PP_EXHAUSTIVE=1")
@pytest.mark.parametrize("first", range(SAMPLE, 1000, CHUNK))
def test_a_thousand_random_packings(first: int) -> None:
    for seed in range(first, min(first + CHUNK, 1000)):
        check(seed)


@pytest.mark.parametrize(("pipelines", "num_chunks"), [(4, 1), (4, 2), (8, 1)])
def test_sequences_over_four_and_eight_ranks_run_beside_shorter_sequences(pipelines: int, num_chunks: int) -> None:
    step = packed([8 * pipelines - 3, 30, 20, 9, 9, 5, 3, 3], PackingRules(pipelines, 8, 0.1))
    contexts = {pack.context for slot in step.slots for pack in slot.packs}
    assert contexts >= {1, 2, 4, pipelines}
    schedule = SCHEDULES[num_chunks][0]
    found = trained(pipelines, num_chunks, step, 2, overlap_p2p_comm=True, pipeline_schedule=schedule)
    assert_sums_are_equal(found, step, 2 * num_chunks)


def test_pipelines_that_run_slots_in_other_orders_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the one order of all pipelines prevents."""
    monkeypatch.setattr(packings, "_PATIENCE", 0.5)
    step = packed([16, 16], PackingRules(2, 8))
    assert [[pack.context for pack in slot.packs] for slot in step.slots] == [[2], [2]]

    def body(rank: PackedRank) -> ToyResult:
        return rank.step(rank.model(), step.ordered([1, 0]) if rank.pipeline else step)

    with pytest.raises((TimeoutError, PipelineError, RuntimeError), match=r"waits for|aborted"):
        run_pipelines(2, SIZE, 1, body)


# --- steps that are planned while the one before runs

RULES = PackingRules(1, 12, 0.5)
LENGTHS = [[7, 12, 1, 1, 5, 9, 3, 12], [3, 3, 12, 12, 1, 11, 2, 6, 6], [12] * 4, [5, 12, 9, 9, 12, 1, 2, 10]]


def train(rank: PackedRank, steps: PackedSteps, split: bool = False) -> tuple[ToyResult, list[PackedStep], list[str]]:
    """All steps, whose gradients add up; the steps, and the schedule that was found for each, if any."""
    rank.config.microbatch_costs = steps
    chunks, taken = rank.model(), list[PackedStep]()
    losses, ran = list[float](), list[str]()
    if split:
        split_weight_grad(chunks)
    result = ToyResult()
    while len(taken) < len(LENGTHS):
        taken.append(steps.next())
        result = rank.step(chunks, taken[-1])
        losses += result.losses
        ran.append("" if steps._plan is None else steps._plan.spec.schedule)
    return ToyResult(losses, result.grads), taken, ran


@pytest.mark.parametrize(("num_chunks", "split"), [(1, False), (1, True), (2, True)])
def test_steps_are_planned_ahead_and_keep_the_numbers_of_one_process(num_chunks: int, split: bool) -> None:
    def body(rank: PackedRank) -> Any:
        return train(rank, PackedSteps(iter(LENGTHS), RULES), split)

    (ranks,) = run_pipelines(1, SIZE, num_chunks, body, store=HashStore, overlap_p2p_comm=True)
    orders = [[slot.packs[0].sequences for step in taken for slot in step.slots] for _, taken, _ in ranks]
    assert all(one == orders[0] for one in orders)
    given = [packed(lengths, RULES) for lengths in LENGTHS]
    assert ranks[0][1][0] == given[0], "the first step is not searched"
    assert ranks[0][1][1] != given[1]
    assert sorted(map(repr, ranks[0][1][1].slots)) == sorted(map(repr, given[1].slots))
    schedules = [ran for _, _, ran in ranks]
    assert all(one == schedules[0] for one in schedules)
    assert schedules[0][0] == ""
    if split:
        assert "auto" in schedules[0][1:]
    packs = [pack for step in ranks[0][1] for slot in step.slots for pack in slot.packs]
    found = merged([result for result, _, _ in ranks])
    assert found.difference(one_process(packs, SIZE * num_chunks)) == 0


def test_ranks_with_other_packs_are_told_apart() -> None:
    def body(rank: PackedRank) -> Any:
        lengths = [[12, 12, 3], [12, 12, 3]] if rank.rank else [[12, 12, 4], [12, 12, 4]]
        return train(rank, PackedSteps(iter(lengths), RULES))

    with pytest.raises(PipelineMismatchError, match="packs of the microbatches"):
        run_pipelines(1, 2, 1, body, store=HashStore)


def test_ranks_whose_packs_differ_from_a_later_step_on_are_told_apart() -> None:
    """The plan is known, and the number of microbatches is the same: tokens would meet targets of other sequences."""
    taken = [0, 0]

    def body(rank: PackedRank) -> Any:
        last = [12, 11, 12] if rank.rank else [12, 12, 11]
        steps = PackedSteps(iter([[12, 12, 12], [12, 12, 12], [12, 12, 12], last]), RULES)
        rank.config.microbatch_costs = steps
        chunks = rank.model()
        for _ in range(4):
            rank.step(chunks, steps.next())
            taken[rank.rank] += 1

    with pytest.raises(PipelineMismatchError, match="packs of the microbatches"):
        run_pipelines(1, 2, 1, body, store=HashStore)
    assert taken == [3, 3]


def test_a_search_that_is_stopped_ends_with_the_failure_of_another_rank() -> None:
    """And by itself after p2p_timeout; the step is not lost by that."""

    def body(rank: PackedRank) -> Any:
        steps = PackedSteps(iter(LENGTHS), RULES)
        rank.config.microbatch_costs = steps
        chunks = rank.model()
        rank.step(chunks, steps.next())
        if rank.rank:
            raise KeyError("another rank")
        child = steps._planner.child
        assert child is not None
        child.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(PipelineError, match=r"has not answered for 1 s") as caught:
            steps.next()
        assert time.monotonic() - began < 10.0
        child.process.send_signal(signal.SIGCONT)
        assert steps.next() != packed(LENGTHS[1], RULES)
        raise caught.value

    with pytest.raises((PipelineError, KeyError)):
        run_pipelines(1, 2, 1, body, store=HashStore, p2p_timeout=1.0)


def test_an_interrupted_wait_loses_no_step() -> None:
    steps = PackedSteps(iter(LENGTHS), RULES)
    spec = PlanSpec("1f1b", SIZE, 1, len(steps.next().slots))
    steps.plan_ahead(spec)
    child = steps._planner.child
    assert child is not None

    def interrupt() -> None:
        raise KeyboardInterrupt

    steps.wait_under(lambda: nullcontext(SimpleNamespace(check=interrupt)), 60.0)
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(KeyboardInterrupt):
        steps.next()
    child.process.send_signal(signal.SIGCONT)
    steps.wait_under(nullcontext, 60.0)
    second = steps.next()
    assert sorted(map(repr, second.slots)) == sorted(map(repr, packed(LENGTHS[1], RULES).slots))
    steps.plan_ahead(spec)
    assert sorted(map(repr, steps.next().slots)) == sorted(map(repr, packed(LENGTHS[2], RULES).slots))


def test_an_answer_for_another_step_is_ignored() -> None:
    steps = PackedSteps(iter(LENGTHS), RULES)
    first = steps.next()
    planner, costs = steps._planner, packed(LENGTHS[3], RULES).costs
    planner.ask(7, NextStep(PlanSpec("1f1b", SIZE, 1, len(costs)), costs))
    steps.plan_ahead(PlanSpec("1f1b", SIZE, 1, len(first.slots)))
    assert sorted(map(repr, steps.next().slots)) == sorted(map(repr, packed(LENGTHS[1], RULES).slots))


def test_lengths_that_raise_end_no_training_silently() -> None:
    def lengths() -> Iterator[list[int]]:
        yield from LENGTHS[:2]
        raise OSError("the disk")

    steps = PackedSteps(lengths(), RULES)
    assert steps.next() == packed(LENGTHS[0], RULES)
    with pytest.raises(OSError, match="the disk"):
        steps.next()
    for _ in range(2):
        with pytest.raises(PipelineError, match="they raised OSError: the disk"):
            steps.next()
    impossible = PackedSteps(iter([LENGTHS[0], [0], LENGTHS[1]]), RULES)
    for _ in range(2):
        with pytest.raises(PlanError, match="at least 1 token"):
            impossible.next()


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [1, 0, 1]])
def test_an_order_with_wrong_slots_is_refused(order: list[int]) -> None:
    step = packed([12, 12], RULES)
    assert len(step.slots) == 2
    with pytest.raises(PlanError, match="is no order of 2 microbatches"):
        step.ordered(order)


def test_a_step_whose_microbatches_were_not_taken() -> None:
    def body(rank: PackedRank) -> Any:
        steps = PackedSteps(iter(LENGTHS), RULES)
        rank.config.microbatch_costs = steps
        chunks = rank.model()
        step = steps.next()
        rank.step(chunks, step)
        rank.step(chunks, step)

    with pytest.raises(ScheduleInputError, match=r"call next\(\) of the PackedSteps"):
        run_pipelines(1, 2, 1, body, store=HashStore)


def test_the_wait_of_a_step_for_its_search_is_counted() -> None:
    steps = PackedSteps(iter(LENGTHS), RULES)
    steps.plan_ahead(PlanSpec("1f1b", SIZE, 1, len(steps.next().slots)))
    assert steps._planner.child is not None
    process = steps._planner.child.process
    assert select.select([process.stdout], [], [], 60)[0], "it has answered"
    assert steps.next() != packed(LENGTHS[1], RULES)
    assert steps.waited < 0.2
    process.send_signal(signal.SIGSTOP)
    threading.Timer(0.6, process.send_signal, [signal.SIGCONT]).start()
    steps.plan_ahead(PlanSpec("1f1b", SIZE, 1, 4))
    steps.next()
    assert steps.waited > 0.4


def test_a_search_that_dies_is_an_error() -> None:
    def body(rank: PackedRank) -> Any:
        steps = PackedSteps(iter(LENGTHS), RULES)
        rank.config.microbatch_costs = steps
        chunks = rank.model()
        rank.step(chunks, steps.next())
        step, child = steps.next(), steps._planner.child
        assert child is not None
        process = child.process
        process.kill()
        process.wait()
        rank.step(chunks, step)
        steps.next()

    with pytest.raises(PipelineError, match=r"plans the next step of packed sequences ended with code -9"):
        run_pipelines(1, 2, 1, body, store=HashStore)

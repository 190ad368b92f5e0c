"""Which microbatch counts run at full speed, held against the bubble of the schedules themselves."""

from __future__ import annotations

import itertools

import pytest

from megatron_pp.config.microbatch_counts import explain_microbatch_count
from megatron_pp.errors import ConfigError, MicrobatchCountError
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Shape
from megatron_pp.planner.timing import order_time


def bubble(schedule: str, size: int, chunks: int, count: int, group: int) -> float:
    """Idle time of a rank within one step, with free communication: ranks run their orders as inputs become ready."""
    family, place = SCHEDULES[schedule], Placement(LOOP, size, chunks)
    orders = family.orders(Shape(size, chunks, count, min(group, count)))
    return order_time(orders, place, StageCosts.uniform(size * chunks), 0.0) - 3 * count * chunks


@pytest.mark.parametrize(("size", "chunks"), list(itertools.product((2, 3, 4), (2, 3))))
def test_a_full_speed_count_has_the_schedules_own_bubble(size, chunks):
    own_bubble = 3 * (size - 1)
    for group, count in itertools.product((size, size + 1, 2 * size), range(1, 4 * size + 2)):
        measured = bubble("interleaved_1f1b", size, chunks, count, group)
        verdict = explain_microbatch_count(count, size, chunks, group)
        assert verdict.full_speed == (measured == own_bubble), (group, count, measured)


@pytest.mark.parametrize(
    ("arguments", "nearest", "words"),
    [
        ((10, 4, 2), (8, 12), "the last group has 2 of 4"),
        ((3, 4, 2), (4,), "fewer microbatches than ranks"),
        ((3, 4), (4,), "fewer microbatches than ranks"),
        ((7, 3, 2, 6), (6, 9), "the last group has 1 of 6"),
    ],
)
def test_slow_microbatch_counts_name_the_reason_and_the_nearest_fast_counts(arguments, nearest, words):
    verdict = explain_microbatch_count(*arguments)
    assert not verdict.full_speed
    assert verdict.nearest == nearest
    assert words in verdict.sentence
    assert all(str(count) in verdict.sentence for count in nearest)
    assert all(explain_microbatch_count(count, *arguments[1:]).full_speed for count in nearest)


def test_every_count_from_one_is_legal():
    verdicts = [explain_microbatch_count(count, 4, 2) for count in range(1, 13)]
    assert [verdict.count for verdict in verdicts] == list(range(1, 13))
    assert [verdict.count for verdict in verdicts if verdict.full_speed] == [4, 8, 12]


def test_a_group_larger_than_the_step_is_the_step():
    assert explain_microbatch_count(5, 4, 2, group_size=100).full_speed


def test_one_rank_runs_anything_at_full_speed():
    assert all(explain_microbatch_count(count, 1, 3).full_speed for count in range(1, 6))


@pytest.mark.parametrize("count", [0, -3, 2.0, True, None])
def test_impossible_counts_are_refused(count):
    with pytest.raises(MicrobatchCountError, match="num_microbatches is"):
        explain_microbatch_count(count, 2)


@pytest.mark.parametrize(("chunks", "group"), [(2, 3), (1, 0), (2, -4)])
def test_impossible_group_sizes_are_refused(chunks, group):
    with pytest.raises(ConfigError, match="microbatch_group_size_per_vp_stage is"):
        explain_microbatch_count(8, 4, chunks, group)

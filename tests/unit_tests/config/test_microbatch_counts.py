"""Which microbatch counts run at full speed, held against the bubble of the schedules themselves."""

from __future__ import annotations

import itertools

import pytest

from megatron_pp.config.microbatch_counts import explain_microbatch_count, legal_microbatch_counts
from megatron_pp.errors import ConfigError, MicrobatchCountError
from megatron_pp.plan.ir.instruction import FORWARD
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Shape

FORWARD_TIME, BACKWARD_TIME = 1, 2


def bubble(schedule: str, size: int, chunks: int, count: int, group: int) -> int:
    """Idle time of a rank within one step, with free communication: ranks run their orders as inputs become ready."""
    family = SCHEDULES[schedule]
    place = Placement(family.placement, size, chunks)
    waiting = [list(order) for order in family.orders(Shape(size, chunks, count, min(group, count)))]
    clock = [0] * size
    done: dict[tuple[bool, int, int], int] = {}
    while any(waiting):
        for rank, stage, op in [(r, place.stage(r, w[0].chunk), w[0]) for r, w in enumerate(waiting) if w]:
            forward = op.op == FORWARD
            needs = [(True, stage - 1, op.mb)] if forward else [(True, stage, op.mb), (False, stage + 1, op.mb)]
            needs = [need for need in needs if 0 <= need[1] < place.num_stages]
            if all(need in done for need in needs):
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = done[forward, stage, op.mb] = start + (FORWARD_TIME if forward else BACKWARD_TIME)
                waiting[rank].pop(0)
    return max(clock) - count * chunks * (FORWARD_TIME + BACKWARD_TIME)


@pytest.mark.parametrize(("size", "chunks"), list(itertools.product((2, 3, 4), (2, 3))))
def test_full_speed_is_the_schedule_at_its_own_bubble(size, chunks):
    own_bubble = (size - 1) * (FORWARD_TIME + BACKWARD_TIME)
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
def test_slow_counts_name_the_reason_and_the_nearest_fast_ones(arguments, nearest, words):
    verdict = explain_microbatch_count(*arguments)
    assert not verdict.full_speed
    assert verdict.nearest == nearest
    assert words in verdict.sentence
    assert all(str(count) in verdict.sentence for count in nearest)
    assert all(explain_microbatch_count(count, *arguments[1:]).full_speed for count in nearest)


def test_every_count_from_one_is_legal():
    verdicts = legal_microbatch_counts(4, 2, at_most=12)
    assert [verdict.count for verdict in verdicts] == list(range(1, 13))
    assert [verdict.count for verdict in verdicts if verdict.full_speed] == [4, 8, 12]


def test_a_group_larger_than_the_step_is_the_step():
    assert explain_microbatch_count(5, 4, 2, group_size=100).full_speed


def test_one_rank_runs_anything_at_full_speed():
    assert all(verdict.full_speed for verdict in legal_microbatch_counts(1, 3, at_most=5))


@pytest.mark.parametrize("count", [0, -3, 2.0, True, None])
def test_impossible_counts_are_refused(count):
    with pytest.raises(MicrobatchCountError, match="num_microbatches is"):
        explain_microbatch_count(count, 2)


@pytest.mark.parametrize(("chunks", "group"), [(2, 3), (1, 0), (2, -4)])
def test_impossible_group_sizes_are_refused(chunks, group):
    with pytest.raises(ConfigError, match="microbatch_group_size_per_vp_stage is"):
        explain_microbatch_count(8, 4, chunks, group)

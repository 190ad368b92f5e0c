"""Which rank and chunk holds which stage, in a loop and in a V."""

from __future__ import annotations

import pytest

from megatron_pp.plan.placement import LOOP, PLACEMENTS, V_SHAPE, Placement


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("pipeline_size", [1, 2, 3, 4, 7])
def test_every_stage_has_one_home(kind: str, pipeline_size: int, num_chunks: int) -> None:
    placement = Placement(kind, pipeline_size, num_chunks)
    assert placement.num_stages == pipeline_size * num_chunks
    seen = [stage for row in placement.stages for stage in row]
    assert sorted(seen) == list(range(placement.num_stages))
    for rank in range(pipeline_size):
        for chunk in range(num_chunks):
            stage = placement.stage(rank, chunk)
            assert placement.stages[rank][chunk] == stage
            assert placement.homes[stage] == (rank, chunk)
            assert placement.is_first_stage(rank, chunk) == (stage == 0)
            assert placement.is_last_stage(rank, chunk) == (stage == placement.num_stages - 1)


def test_a_loop_goes_round() -> None:
    assert Placement(LOOP, 4, 2).stages == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert Placement(LOOP, 2, 3).stages == ((0, 2, 4), (1, 3, 5))


def test_a_v_turns_on_the_last_rank_and_ends_on_the_first() -> None:
    assert Placement(V_SHAPE, 4, 2).stages == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert Placement(V_SHAPE, 2, 4).stages == ((0, 3, 4, 7), (1, 2, 5, 6))
    placement = Placement(V_SHAPE, 4, 2)
    assert not placement.crosses_ranks(3)  # the turn: stages 3 and 4 are both on rank 3
    assert all(placement.crosses_ranks(s) for s in (0, 1, 2, 4, 5, 6))
    assert placement.is_first_stage(0, 0)
    assert placement.is_last_stage(0, 1)


@pytest.mark.parametrize(
    ("placement", "edges"),
    [
        (Placement(LOOP, 1, 1), []),
        (Placement(LOOP, 1, 3), []),
        (Placement(LOOP, 2, 1), [(0, 1)]),
        (Placement(LOOP, 2, 2), [(0, 1), (1, 0)]),
        (Placement(LOOP, 4, 1), [(0, 1), (1, 2), (2, 3)]),
        (Placement(LOOP, 4, 2), [(0, 1), (1, 2), (2, 3), (3, 0)]),
        (Placement(V_SHAPE, 3, 2), [(0, 1), (1, 0), (1, 2), (2, 1)]),
    ],
)
def test_edges_are_where_activations_travel(placement: Placement, edges: list[tuple[int, int]]) -> None:
    assert placement.rank_edges == tuple(edges)


def test_impossible_placements_are_refused() -> None:
    with pytest.raises(ValueError, match="'ring' is not known; it is one of loop, v"):
        Placement("ring", 2, 1)
    with pytest.raises(ValueError, match="pipeline size 0 and chunks 1 must be at least 1"):
        Placement(LOOP, 0, 1)
    with pytest.raises(ValueError, match="chunks 0"):
        Placement(V_SHAPE, 2, 0)

"""Which rank and chunk holds which stage, in a loop and in a V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_pp import PlanError, build_plan, stage_numbers
from megatron_pp.plan.ir.placement import LOOP, PLACEMENTS, V_SHAPE, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from testkit.inputs.plan_text import save_plan


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
    for chunks, barriers in ((1, -1), (1, 3), (2, 1), (2, 2)):
        with pytest.raises(ValueError, match=f"^{barriers} barriers with {chunks} chunks a rank: a split output layer"):
            Placement(LOOP, 2, chunks, barriers)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stage_numbers_are_where_the_plan_has_the_stages(name: str) -> None:
    chunks = SCHEDULES[name].chunks or 2
    plan = build_plan(PlanSpec(name, 2, chunks, 4, slices=2 if SCHEDULES[name].sliced else 1))
    assert stage_numbers(name, 2, chunks) == plan.placement.stages


def test_stage_numbers_of_a_schedule_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_plan(build_plan(PlanSpec("zb_v", 2, 2, 4)), path)
    assert stage_numbers(str(path), 2, 2) == ((0, 3), (1, 2))
    with pytest.raises(PlanError, match=r"mine\.json is a schedule for 2 ranks, not 4"):
        stage_numbers(str(path), 4, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zbv", 2, 2), r"schedule 'zbv' is not known \(did you mean zb_v\?\)"),
        ((None, 2, 1), "schedule None is not known; it is one of gpipe"),
        ((["1f1b"], 2, 1), r"schedule \['1f1b'\] is not known; it is one of gpipe"),
        (("zb_v", 2, 3), r"schedule zb_v has 2 model chunk\(s\) a rank, not 3"),
        (("1f1b", 0, 1), "pipeline size is 0; it must be a whole number of at least 1"),
        (("1f1b", 2.0, 1), r"pipeline size is 2\.0; it must be a whole number of at least 1"),
        (("interleaved_1f1b", 2, True), "number of model chunks is True; it must be a whole number of at least 1"),
    ],
)
def test_stage_numbers_refuses_what_is_no_pipeline(arguments: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        stage_numbers(*arguments)

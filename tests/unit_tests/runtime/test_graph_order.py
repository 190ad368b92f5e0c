"""Transformer Engine's CUDA graphs: the order in which Megatron captures them, and plans that differ from it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_pp.config.settings import TE_GRAPHS
from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.runtime.graph_order import captured_order, check_graph_order
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData
from tests.harness.p2p_ranks import NothingMayPass


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [None, 2, 3])
def test_the_order_is_megatrons_own(size: int, chunks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules: Any = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    cuda_graphs: Any = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    state = schedules.parallel_state
    monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: size)
    monkeypatch.setattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: chunks)
    count = chunks or 1
    for rank in range(size):
        monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        for group in (size, size + 1):
            for microbatches in range(1, 3 * size + 1):
                warm_up = schedules.get_pp_rank_microbatches(microbatches, count, group, False)[2]
                table = schedules.get_schedule_table(microbatches, count, group)
                expected = cuda_graphs.convert_schedule_table_to_order(warm_up, count, table)
                order = captured_order(size, rank, count, microbatches, group, interleaved=chunks is not None)
                assert order == expected, (rank, group, microbatches)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_megatrons_schedules_run_in_the_order_of_capture(size: int) -> None:
    for microbatches in range(1, 3 * size + 1):
        check_graph_order(PlanSpec("1f1b", size, 1, microbatches), interleaved=False)
    for chunks in (2, 3):
        for groups in (1, 2, 3):
            check_graph_order(PlanSpec("interleaved_1f1b", size, chunks, groups * size), interleaved=True)
    wide = PlanSpec("interleaved_1f1b", size, 2, 2 * (size + 1), group_size=size + 1)
    check_graph_order(wide, interleaved=True)


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches"),
    [("gpipe", 1, 8), ("zb_h2", 1, 8), ("eager_1f1b", 1, 8), ("breadth_first", 2, 8), ("interleaved_1f1b", 2, 9)],
)
def test_another_order_is_refused(schedule: str, chunks: int, microbatches: int) -> None:
    spec = PlanSpec(schedule, 4, chunks, microbatches)
    with pytest.raises(ScheduleInputError, match=f"operation .* of pipeline rank 0 is the .* in schedule {schedule}"):
        check_graph_order(spec, interleaved=chunks > 1)
    check_graph_order(PlanSpec(schedule, 4, chunks, microbatches, forward_only=True), interleaved=chunks > 1)


@pytest.mark.parametrize("policy", ["overlap_p2p_comm", "batch_p2p_comm"])
def test_a_step_is_refused_before_anything_is_sent(policy: str) -> None:
    for schedule, graphs, error, words in (
        ("gpipe", TE_GRAPHS, ScheduleInputError, "cuda_graph_impl is 'transformer_engine'"),
        ("1f1b", TE_GRAPHS, AssertionError, "was posted"),
        ("gpipe", "local", AssertionError, "was posted"),
    ):
        fields: dict[str, Any] = {policy: True, "cuda_graph_impl": graphs, "pipeline_schedule": schedule}
        with pytest.raises(error, match=words):
            run_in_threads(2, 1, ToyData(4), network=NothingMayPass(2), **fields)

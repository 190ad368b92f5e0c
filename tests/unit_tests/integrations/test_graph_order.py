"""Plans in another order than that in which Megatron captures graphs, or copies offloaded activations back."""

from __future__ import annotations

import inspect
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_pp.config.settings import TE_GRAPHS
from megatron_pp.errors import ScheduleInputError
from megatron_pp.integrations.megatron import graph_order
from megatron_pp.integrations.megatron.graph_order import captured_order, check_graph_order, check_offload_order
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData
from testkit.thread_runs.p2p_ranks import NothingMayPass


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [None, 2, 3])
def test_the_order_is_megatrons_own(size: int, chunks: int | None) -> None:
    """TECudaGraphHelper computes it from a communicator that it makes itself; in pairs, for each layer."""
    schedules: Any = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    cuda_graphs: Any = pytest.importorskip("megatron.core.transformer.cuda_graphs")
    if size == 1 and chunks is not None:
        pytest.skip("no pipeline, no chunks")
    count = chunks or 1
    for rank in range(size):
        group_of = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        communicator = SimpleNamespace(pp_group=group_of, virtual_pipeline_model_parallel_size=chunks)
        for group in (size, size + 1):
            for microbatches in range(1, 3 * size + 1):
                counts = schedules.get_pp_rank_microbatches(
                    microbatches, count, group, forward_only=False, p2p_communicator=communicator
                )
                table = schedules.get_schedule_table(microbatches, count, group)
                expected = cuda_graphs.convert_schedule_table_to_order(counts[2], count, table)
                of_rank = size, rank, count, microbatches, group, chunks is not None
                assert captured_order(*of_rank) == [(one,) for one in expected], (rank, group, microbatches)
                layers, _ = cuda_graphs.get_overlap_moe_expert_parallel_comm_order(expected, [1] * count, False)
                joined = captured_order(*of_rank, joined=True)
                assert [one for entry in joined for one in entry] == layers, (rank, group, microbatches)
                if counts[3] > 1:
                    assert any(len(entry) == 2 for entry in joined)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_megatrons_schedules_run_in_the_order_of_capture(size: int) -> None:
    for microbatches in range(1, 3 * size + 1):
        check_graph_order(PlanSpec("1f1b", size, 1, microbatches), interleaved=False)
        check_offload_order(PlanSpec("1f1b", size, 1, microbatches), interleaved=False)
    for chunks in (2, 3):
        for groups in (1, 2, 3):
            check_graph_order(PlanSpec("interleaved_1f1b", size, chunks, groups * size), interleaved=True)
            pairs = PlanSpec("combined_1f1b", size, chunks, groups * size, overlap_pairs=True)
            check_offload_order(pairs, interleaved=True)
            if groups > 1:  # a rank that is through with its forwards in the warm-up still pairs the last one
                check_graph_order(pairs, interleaved=True)
    wide = PlanSpec("interleaved_1f1b", size, 2, 2 * (size + 1), group_size=size + 1)
    check_graph_order(wide, interleaved=True)
    check_graph_order(PlanSpec("combined_1f1b", 1, 1, 4, overlap_pairs=True), interleaved=False)


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches"),
    [("gpipe", 1, 8), ("zb_h2", 1, 8), ("eager_1f1b", 1, 8), ("breadth_first", 2, 8), ("interleaved_1f1b", 2, 9)],
)
def test_another_order_is_refused(schedule: str, chunks: int, microbatches: int) -> None:
    spec = PlanSpec(schedule, 4, chunks, microbatches)
    with pytest.raises(ScheduleInputError, match=f"operation .* of pipeline rank 0 is the .* in schedule {schedule}"):
        check_graph_order(spec, interleaved=chunks > 1)
    check_graph_order(PlanSpec(schedule, 4, chunks, microbatches, forward_only=True), interleaved=chunks > 1)


def test_groups_are_those_of_megatrons_config() -> None:
    """By which it captures, whatever `install()` was given."""
    spec = PlanSpec("interleaved_1f1b", 2, 2, 12, group_size=3)
    check_graph_order(spec, True, group_size=3)
    for check in (check_graph_order, check_offload_order):
        with pytest.raises(ScheduleInputError, match="operation 2 of pipeline rank 0 is the forward of chunk 0"):
            check(spec, True, group_size=2)


@pytest.mark.parametrize(
    ("schedule", "chunks", "words"),
    [
        ("dualpipe_v", 2, "4 of pipeline rank 0 is the forward of chunk 0 in .*, and the forward of chunk 1 in the"),
        ("combined_1f1b", 1, "4 of pipeline rank 0 is the .* in .*, and the forward of chunk 0 with the backward of"),
        ("interleaved_1f1b", 2, "10 of .* is the forward of chunk 0 with the backward of chunk 1 in .*, and the"),
    ],
)
def test_pairs_are_those_of_the_capture(schedule: str, chunks: int, words: str) -> None:
    """Layers of a pair's two halves are captured in turn."""
    with pytest.raises(ScheduleInputError, match=words):
        check_graph_order(PlanSpec(schedule, 4, chunks, 8, overlap_pairs=True), interleaved=chunks > 1)


# -- fine-grained offloading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (2, 2), (3, 3), (4, 2)])
def test_megatron_pairs_backwards_with_forwards_in_its_own_order(
    size: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule is PipelineOffloadManager's, in the first step: which handler each backward takes."""
    offload: Any = pytest.importorskip("megatron.core.pipeline_parallel.fine_grained_activation_offload")
    monkeypatch.setattr(offload, "ChunkOffloadHandler", lambda *unused, **ignored: SimpleNamespace())  # it has streams
    signature = inspect.signature(offload.PipelineOffloadManager.init_model_chunk_offload_handler).parameters
    for rank in range(size):
        for microbatches in (size, 2 * size, 2 * size + 1):
            order = [one for (one,) in captured_order(size, rank, chunks, microbatches, size, chunks > 1)]
            more = {"pp_rank": rank} if "pp_rank" in signature else {}
            manager = object.__new__(offload.PipelineOffloadManager)
            manager.__dict__ |= {"_queue": deque(), "_stages": None, "_is_warmup": True, "_cpu_tensor_pool": None}
            manager.__dict__ |= {"_cached_chunks_forward": [], "_cached_chunks_backward": []}
            for one in order:
                if one > 0:
                    manager.init_model_chunk_offload_handler(vp_size=chunks, vp_stage=one - 1, **more)
            taken = [handler.vpp_rank for handler in manager._cached_chunks_backward]
            assert taken == [-one - 1 for one in order if one < 0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2", "gpipe", "eager_1f1b"])
def test_one_chunk_has_one_order_of_backwards(schedule: str) -> None:
    check_offload_order(PlanSpec(schedule, 4, 1, 8), interleaved=False)


@pytest.mark.parametrize("schedule", ["breadth_first", "zb_v", "1f1b_v", "dualpipe_v"])
def test_backwards_that_would_get_other_activations_are_refused(schedule: str) -> None:
    spec = PlanSpec(schedule, 4, 2, 8)
    with pytest.raises(ScheduleInputError, match=f"rank 0 is the .* in schedule {schedule}, and .* get the"):
        check_offload_order(spec, interleaved=True)
    check_offload_order(PlanSpec(schedule, 4, 2, 8, forward_only=True), interleaved=True)


@pytest.mark.parametrize("policy", ["overlap_p2p_comm", "batch_p2p_comm"])
def test_a_step_is_refused_before_anything_is_sent(policy: str) -> None:
    offloads = {"fine_grained_activation_offloading": True}
    for schedule, chunks, fields, error, words in (
        ("gpipe", 1, {"cuda_graph_impl": TE_GRAPHS}, ScheduleInputError, "cuda_graph_impl is 'transformer_engine'"),
        ("1f1b", 1, {"cuda_graph_impl": TE_GRAPHS}, AssertionError, "was posted"),
        ("gpipe", 1, {"cuda_graph_impl": "local"}, AssertionError, "was posted"),
        ("breadth_first", 2, offloads, ScheduleInputError, "fine_grained_activation_offloading is set"),
        ("interleaved_1f1b", 2, offloads, AssertionError, "was posted"),
    ):
        more: dict[str, Any] = {policy: True, "pipeline_schedule": schedule, **fields}
        with pytest.raises(error, match=words):
            run_in_threads(2, chunks, ToyData(4), network=NothingMayPass(2), **more)


def observed(
    kind: Any, spec: dict[str, Any], group: int | None = None, offloads: bool = False, joins: bool = False
) -> Any:
    """What a step of these fields asks for under a config of Megatron's with this size of groups."""
    settings = SimpleNamespace(
        cuda_graph_impl=kind, fine_grained_activation_offloading=offloads, virtual_pipeline_model_parallel_size=2
    )
    config = SimpleNamespace(microbatch_group_size_per_vp_stage=group)
    draft = PlanSpec(**{"pipeline_size": 2, "num_chunks": 2, "num_microbatches": 12, **spec})
    return graph_order.step_observer(
        SimpleNamespace(draft=draft, settings=settings, config=config, joins=joins, weights=None)
    )


def test_pairs_of_megatrons_are_checked_before_a_step_with_its_graphs() -> None:
    """Megatron's schedule plans replay Transformer Engine's graphs, not Megatron's own."""
    pairs = {"schedule": "dualpipe_v", "overlap_pairs": True}
    with pytest.raises(ScheduleInputError, match="schedule dualpipe_v"):
        observed(TE_GRAPHS, pairs, joins=True)
    assert observed("local", pairs, joins=True) is None


@pytest.mark.parametrize(("kind", "offloads"), [(TE_GRAPHS, False), (False, True), ("none", True)])
def test_a_step_in_groups_of_another_size_than_megatrons_config_has(kind: Any, offloads: bool) -> None:
    wide = {"schedule": "interleaved_1f1b", "group_size": 3}
    assert observed(kind, wide, group=3, offloads=offloads) is None
    with pytest.raises(ScheduleInputError, match="in schedule interleaved_1f1b"):
        observed(kind, wide, group=2, offloads=offloads)

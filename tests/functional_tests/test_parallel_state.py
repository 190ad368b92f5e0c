"""Groups made by real gloo processes, each used once, and the errors that every process raises by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp import parallel_state as state
from megatron_pp.config.parallel_grid import fit_grid
from megatron_pp.errors import WorldSizeError
from tests.harness.processes import run_processes

WORLD = 4
DEADLINE = 180.0  # seconds for all processes

GRIDS = [
    {"pipeline_model_parallel_size": 4},
    {"pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "data_parallel_size": 2},
    {},
]


def members(group: dist.ProcessGroup) -> list[int]:
    """The members of a group, found with the group itself: each member adds its own bit."""
    total = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(total, group=group)
    return [rank for rank in range(WORLD) if total.item() >> rank & 1]


def use_every_group(rank: int) -> list[dict[str, Any]]:
    seen = []
    for grid in GRIDS:
        state.initialize_model_parallel(**grid)
        place = {
            "tp": members(state.get_tensor_model_parallel_group()),
            "cp": members(state.get_context_parallel_group()),
            "dp": members(state.get_data_parallel_group()),
            "dp_cp": members(state.get_data_parallel_group(with_context_parallel=True)),
            "pp": members(state.get_pipeline_model_parallel_group()),
            "mp": members(state.get_model_parallel_group()),
            "embedding": members(state.get_embedding_group()) if state.is_rank_in_embedding_group() else None,
            "ranks": (
                state.get_tensor_model_parallel_rank(),
                state.get_context_parallel_rank(),
                state.get_data_parallel_rank(),
                state.get_pipeline_model_parallel_rank(),
            ),
            "sizes": (
                state.get_tensor_model_parallel_world_size(),
                state.get_context_parallel_world_size(),
                state.get_data_parallel_world_size(),
                state.get_pipeline_model_parallel_world_size(),
            ),
            "neighbours": (
                state.get_pipeline_model_parallel_prev_rank(),
                state.get_pipeline_model_parallel_next_rank(),
            ),
            "ends": (state.is_pipeline_first_stage(), state.is_pipeline_last_stage()),
            "device": (state.get_backend(), state.get_device()),
        }
        seen.append(place)
        state.destroy_model_parallel()
    return seen


def everything(rank: int, _: int) -> dict[str, Any]:
    return {"groups": use_every_group(rank), "chunks": walk_chunks(rank), "misuse": misuse(rank)}


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_processes(everything, WORLD, timeout=DEADLINE, start_method="mixed")


def test_every_group_works_and_has_the_right_members(answers):
    seen = [answer["groups"] for answer in answers]
    for k, sizes in enumerate(GRIDS):
        grid = fit_grid(
            WORLD,
            sizes.get("tensor_model_parallel_size", 1),
            sizes.get("pipeline_model_parallel_size", 1),
            sizes.get("context_parallel_size", 1),
        )
        for rank in range(WORLD):
            check_place(seen[rank][k], rank, grid)


def check_place(place, rank, grid):
    def mine(*along):
        return next(group for group in grid.groups(*along) if rank in group)

    for kind, along in {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "mp": ("tp", "pp")}.items():
        assert place[kind] == mine(*along), (kind, rank)
    assert place["dp_cp"] == mine("cp", "dp")
    pipeline = mine("pp")
    at = pipeline.index(rank)
    ends = sorted({pipeline[0], pipeline[-1]})
    assert place["embedding"] == (ends if rank in ends else None)
    assert place["ranks"] == tuple(grid.coordinates(rank).values())
    assert place["sizes"] == grid
    assert place["neighbours"] == (pipeline[at - 1], pipeline[(at + 1) % len(pipeline)])
    assert place["ends"] == (at == 0, at == len(pipeline) - 1)
    assert place["device"] == ("gloo", torch.device("cpu"))


def walk_chunks(rank: int) -> dict[str, Any]:
    found = {}
    for placement in ("loop", "v"):
        state.initialize_model_parallel(1, 4, 2, pipeline_placement=placement)
        for chunk in range(2):
            where = {"ignore_virtual": False, "vp_stage": chunk}
            found[placement, chunk] = (state.is_pipeline_first_stage(**where), state.is_pipeline_last_stage(**where))
        found[placement, "rank"] = (state.is_pipeline_first_stage(), state.is_pipeline_last_stage())
        found[placement, "embedding"] = (
            dist.get_process_group_ranks(state.get_embedding_group()) if state.is_rank_in_embedding_group() else None
        )
        if rank == 0:
            found["unsaid"] = error_of(lambda: state.is_pipeline_first_stage(ignore_virtual=False))
        state.set_virtual_pipeline_model_parallel_world_size(None)
        found[placement, "V"] = state.get_virtual_pipeline_model_parallel_world_size()
        state.destroy_model_parallel()
    return found


def test_first_and_last_stage_of_a_loop_and_of_a_v(answers):
    found = [answer["chunks"] for answer in answers]
    for rank in range(WORLD):
        assert found[rank]["loop", 0] == (rank == 0, False)
        assert found[rank]["loop", 1] == (False, rank == 3)
        assert found[rank]["loop", "rank"] == (rank == 0, rank == 3)
        assert found[rank]["loop", "embedding"] == ([0, 3] if rank in (0, 3) else None)
        assert found[rank]["v", 0] == (rank == 0, False)
        assert found[rank]["v", 1] == (False, rank == 0)
        assert found[rank]["v", "rank"] == (rank == 0, rank == 0)
        assert found[rank]["v", "embedding"] == ([0] if rank == 0 else None)
        assert found[rank]["loop", "V"] is None
    kind, sentence = found[0]["unsaid"]
    assert (kind, "vp_stage=" in sentence) == ("ParallelStateError", True)


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def misuse(rank: int) -> dict[str, tuple[str, str]]:
    """Ranks disagree about what is wrong, so an error that waited for peers would never come."""
    found = {}
    if rank != 3:
        found["world"] = error_of(lambda: state.initialize_model_parallel(pipeline_model_parallel_size=3))
        found["placement"] = error_of(lambda: state.initialize_model_parallel(1, 4, pipeline_placement="zigzag"))
    state.initialize_model_parallel(pipeline_model_parallel_size=4)
    if rank == 2:
        found["twice"] = error_of(lambda: state.initialize_model_parallel(pipeline_model_parallel_size=4))
        found["embedding"] = error_of(state.get_embedding_group)
    state.destroy_model_parallel()
    state.destroy_model_parallel()
    return found


def test_misuse_is_an_error_on_the_rank_that_commits_it(answers):
    found = [answer["misuse"] for answer in answers]
    for rank in range(3):
        assert found[rank]["world"][0] == WorldSizeError.__name__
        assert "nearest: 3 or 6 processes" in found[rank]["world"][1]
        assert found[rank]["placement"] == ("ConfigError", "placement 'zigzag' is not known; it is one of loop, v")
    assert found[2]["twice"][0] == "ParallelStateError"
    assert found[2]["embedding"][0] == "ParallelStateError"


@pytest.mark.gpu
def test_nccl_groups_put_tensors_on_the_gpu(tmp_path):
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        state.initialize_model_parallel()
        assert state.get_backend() == "nccl"
        assert state.get_device().type == "cuda"
    finally:
        state.destroy_model_parallel()
        dist.destroy_process_group()

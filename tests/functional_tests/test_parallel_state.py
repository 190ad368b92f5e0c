"""Groups that real gloo processes make, each used once, and the errors that every process raises by itself.

Every rank checks its own groups; all tests share the same processes.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_pp import parallel_state as state
from megatron_pp.config.parallel_grid import Grid
from megatron_pp.errors import ConfigError, ParallelStateError, WorldSizeError
from testkit.processes import run_processes

WORLD = 4
KINDS = ("tensor_model", "context", "data", "pipeline_model")
GRIDS = [Grid(*sizes) for sizes in ((1, 1, 1, 4), (1, 1, 2, 2), (2, 1, 1, 2), (1, 2, 1, 2), (2, 1, 2, 1), (1, 1, 4, 1))]


def members(group: dist.ProcessGroup) -> list[int]:
    """Return the members of a group, found by a reduction over the group, to which each member adds its own bit."""
    total = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(total, group=group)
    return [rank for rank in range(WORLD) if total.item() >> rank & 1]


def check_every_group(rank: int, grid: Grid) -> None:
    def mine(*along: str) -> list[int]:
        return next(group for group in grid.groups(*along) if rank in group)

    for kind, name in zip(KINDS, ("tp", "cp", "dp", "pp"), strict=True):
        assert members(getattr(state, f"get_{kind}_parallel_group")()) == mine(name), kind
        assert getattr(state, f"get_{kind}_parallel_rank")() == grid.coordinates(rank)[name], kind
        assert getattr(state, f"get_{kind}_parallel_world_size")() == len(mine(name)), kind
    assert members(state.get_data_parallel_group(with_context_parallel=True)) == mine("cp", "dp")
    assert members(state.get_model_parallel_group()) == mine("tp", "pp")
    pipeline = mine("pp")
    at, ends = pipeline.index(rank), sorted({pipeline[0], pipeline[-1]})
    assert state.is_rank_in_embedding_group() == (rank in ends)
    assert rank not in ends or members(state.get_embedding_group()) == ends
    neighbours = state.get_pipeline_model_parallel_prev_rank(), state.get_pipeline_model_parallel_next_rank()
    assert neighbours == (pipeline[at - 1], pipeline[(at + 1) % len(pipeline)])
    assert (state.is_pipeline_first_stage(), state.is_pipeline_last_stage()) == (at == 0, at == len(pipeline) - 1)
    assert (state.get_backend(), state.get_device()) == ("gloo", torch.device("cpu"))


def check_chunks(rank: int, placement: str, first: tuple[int, int], last: tuple[int, int]) -> None:
    """``first`` and ``last``: the rank and the chunk of these stages."""
    state.initialize_model_parallel(1, WORLD, 2, pipeline_placement=placement)
    for chunk in range(2):
        where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk}
        assert state.is_pipeline_first_stage(**where) == ((rank, chunk) == first)
        assert state.is_pipeline_last_stage(**where) == ((rank, chunk) == last)
    assert (state.is_pipeline_first_stage(), state.is_pipeline_last_stage()) == (rank == first[0], rank == last[0])
    ends = sorted({first[0], last[0]})
    assert state.is_rank_in_embedding_group() == (rank in ends)
    assert rank not in ends or dist.get_process_group_ranks(state.get_embedding_group()) == ends
    if rank == 0:
        with pytest.raises(ParallelStateError, match="vp_stage="):
            state.is_pipeline_first_stage(ignore_virtual=False)
    state.set_virtual_pipeline_model_parallel_world_size(None)
    assert state.get_virtual_pipeline_model_parallel_world_size() is None
    state.destroy_model_parallel()


def check_misuse(rank: int) -> None:
    """Check that each rank raises by itself. Ranks make different mistakes, so that an error which waited for peers
    would not come."""
    if rank != 3:
        with pytest.raises(WorldSizeError, match="nearest: 3 or 6 processes"):
            state.initialize_model_parallel(pipeline_model_parallel_size=3)
        with pytest.raises(ConfigError, match=re.escape("placement 'zigzag' is not known; it is one of loop, v")):
            state.initialize_model_parallel(1, WORLD, pipeline_placement="zigzag")
    state.initialize_model_parallel(pipeline_model_parallel_size=WORLD)
    if rank == 2:
        with pytest.raises(ParallelStateError):
            state.initialize_model_parallel(pipeline_model_parallel_size=WORLD)
        with pytest.raises(ParallelStateError):
            state.get_embedding_group()
    state.destroy_model_parallel()
    state.destroy_model_parallel()


def rank_main(rank: int, _: int) -> None:
    for grid in GRIDS:
        sizes = {"pipeline_model_parallel_size": grid.pipeline_parallel, "context_parallel_size": grid.context_parallel}
        if grid.tensor_parallel * grid.data_parallel == WORLD:  # else its value is what other tests leave
            sizes["data_parallel_size"] = grid.data_parallel
        state.initialize_model_parallel(grid.tensor_parallel, **sizes)
        check_every_group(rank, grid)
        state.destroy_model_parallel()
    check_chunks(rank, "loop", (0, 0), (3, 1))
    check_chunks(rank, "v", (0, 0), (0, 1))
    check_misuse(rank)


def test_parallel_state_groups_of_real_processes_equal_megatrons() -> None:
    run_processes(rank_main, WORLD, timeout=180.0, start_method="mixed")


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

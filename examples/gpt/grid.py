"""Which process this is, and the grid of pipelines and replicas it belongs to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from examples.gpt.errors import ArgumentError
from examples.gpt.rendezvous_store import meeting_store
from megatron_pp import parallel_state
from megatron_pp.config.model_config import TransformerConfig
from megatron_pp.config.parallel_grid import fit_grid
from megatron_pp.faults.nccl_settings import leave_failures_to_the_guard
from megatron_pp.plan.placement import Placement
from megatron_pp.runtime.communicators import close_communicators


@dataclass(frozen=True)
class Process:
    """What ``torchrun`` tells a process about itself; the defaults are those of a lone process.

    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among those of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Process:
        """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(environment.get(name, default)) for name, default in zip(names, (0, 1, 0, 1), strict=True)))


def grid_sizes(world_size: int, pipeline_size: int | None, replicas: int | None) -> tuple[int, int]:
    """Pipeline size and replicas of ``world_size`` processes; with neither given all of them are one pipeline.

    Raises:
        WorldSizeError: they do not fit.
        ConfigError: a size is below 1.
    """
    if pipeline_size is None:
        pipeline_size = max(world_size // (replicas or 1), 1)
    grid = fit_grid(world_size, pipeline_parallel=pipeline_size, data_parallel=replicas)
    return grid.pipeline_parallel, grid.data_parallel


def choose_device(wanted: str, process: Process) -> torch.device:
    """The device of this process: its own GPU, or the CPU.

    Args:
        wanted: ``"cpu"``, ``"cuda"``, or ``"auto"``: GPUs when this machine has one for each of its processes.

    Raises:
        ArgumentError: ``"cuda"`` without enough GPUs.
    """
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    enough = gpus >= process.local_world_size
    if wanted == "cuda" and not enough:
        raise ArgumentError(
            f"--device is cuda, but this machine has {gpus} GPUs for {process.local_world_size} processes; each needs "
            "one: start fewer processes or give --device cpu"
        )
    return torch.device("cuda", process.local_rank) if enough and gpus else torch.device("cpu")


@dataclass(frozen=True)
class GridMember:
    """This process's place, and the groups it talks in.

    Attributes:
        pipeline_rank, data_rank: place in the grid.
        pipeline_group: the ranks that together hold the model.
        data_group: the replicas of this rank's stages.
        embedding_group: the ranks of the first and the last stage; ``None`` elsewhere.
        last_stage_rank: global rank, in this pipeline, of the last stage.
    """

    pipeline_rank: int
    data_rank: int
    pipeline_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None
    last_stage_rank: int


@contextmanager
def joined(process: Process, device: torch.device) -> Iterator[None]:
    """The default process group, for as long as the context is open: NCCL on GPUs, gloo on the CPU."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
        leave_failures_to_the_guard()
    store = meeting_store(process.rank, process.world_size)
    dist.init_process_group(backend, store=store, rank=process.rank, world_size=process.world_size)
    yield
    # Not after an error: taking leave of peers that are in the middle of a step may block.
    close_communicators()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def join_grid(config: TransformerConfig) -> GridMember:
    """Make the groups that ``config`` asks for. Collective over all processes."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        data_parallel_size=config.data_parallel_size,
        pipeline_placement=config.placement_name,
    )
    placement = Placement(config.placement_name, config.pipeline_model_parallel_size, config.num_chunks)
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    holds_an_end = parallel_state.is_rank_in_embedding_group()
    return GridMember(
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        pipeline_group=pipeline_group,
        data_group=parallel_state.get_data_parallel_group(),
        embedding_group=parallel_state.get_embedding_group() if holds_an_end else None,
        last_stage_rank=dist.get_global_rank(pipeline_group, placement.homes[-1][0]),
    )

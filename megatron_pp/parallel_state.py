"""This process's groups, ranks, device and backend, under the names of Megatron's module of this name."""

import torch
import torch.distributed as dist

from megatron_pp.comm import process_groups as groups
from megatron_pp.comm.group_transport import backend_of, device_of
from megatron_pp.comm.process_groups import (
    destroy_model_parallel,
    initialize_model_parallel,
    model_parallel_is_initialized,
    set_virtual_pipeline_model_parallel_world_size,
)
from megatron_pp.errors import ParallelStateError

__all__ = [
    "ParallelStateError", "destroy_model_parallel", "get_backend", "get_context_parallel_group",
    "get_context_parallel_rank", "get_context_parallel_world_size", "get_data_parallel_group", "get_data_parallel_rank",
    "get_data_parallel_world_size", "get_device", "get_embedding_group", "get_model_parallel_group",
    "get_pipeline_model_parallel_first_rank", "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_last_rank", "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank", "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size", "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size", "get_virtual_pipeline_model_parallel_world_size",
    "initialize_model_parallel", "is_pipeline_first_stage", "is_pipeline_last_stage", "is_rank_in_embedding_group",
    "model_parallel_is_initialized", "set_virtual_pipeline_model_parallel_world_size",
]  # fmt: skip


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that split this rank's layers. Every getter raises ParallelStateError where there are no groups."""
    return groups.group_of("tp")


def get_context_parallel_group() -> dist.ProcessGroup:
    """The ranks that split this rank's sequences."""
    return groups.group_of("cp")


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The ranks that hold the same parameters and see other samples (with context parallelism: or parts of samples)."""
    return groups.group_of(_data_kind(with_context_parallel))


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """The ranks of this rank's pipeline, in order."""
    return groups.group_of("pp")


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold one replica of the model: tensor and pipeline parallel together."""
    return groups.group_of("mp")


def get_embedding_group() -> dist.ProcessGroup:
    """The ranks of this pipeline that hold its first and its last stage (one rank where they share it).

    Raises ParallelStateError on ranks that hold neither; ask is_rank_in_embedding_group first.
    """
    return groups.group_of("embd")


def get_tensor_model_parallel_world_size() -> int:
    return groups.size_of("tp")


def get_tensor_model_parallel_rank() -> int:
    return groups.rank_in("tp")


def get_context_parallel_world_size() -> int:
    return groups.size_of("cp")


def get_context_parallel_rank() -> int:
    return groups.rank_in("cp")


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return groups.size_of(_data_kind(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return groups.rank_in(_data_kind(with_context_parallel))


def get_pipeline_model_parallel_world_size() -> int:
    return groups.size_of("pp")


def get_pipeline_model_parallel_rank() -> int:
    return groups.rank_in("pp")


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first rank of this pipeline."""
    return groups.state().members["pp"][0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last rank of this pipeline."""
    return groups.state().members["pp"][-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the pipeline neighbour after this one; of the first rank after the last."""
    return groups.state().members["pp"][(groups.rank_in("pp") + 1) % groups.size_of("pp")]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the pipeline neighbour before this one; of the last rank before the first."""
    return groups.state().members["pp"][groups.rank_in("pp") - 1]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """V, or None without virtual pipelining or before initialization."""
    return groups.virtual_size()


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or with ``ignore_virtual=False`` its chunk ``vp_stage``, holds the model's first stage."""
    return _holds(0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or with ``ignore_virtual=False`` its chunk ``vp_stage``, holds the model's last stage."""
    return _holds(groups.state().placement.num_stages - 1, ignore_virtual, vp_stage)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (this chunk of it) holds the first or the last stage."""
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(ignore_virtual, vp_stage)


def get_backend() -> str:
    """What carries tensors between pipeline stages: "nccl" where the group has it and there is a GPU, else "gloo"."""
    return backend_of(groups.group_of("pp"))


def get_device() -> torch.device:
    """Where tensors that travel between pipeline stages lie."""
    return device_of(get_backend())


def _data_kind(with_context_parallel: bool) -> str:
    return "dp_cp" if with_context_parallel else "dp"


def _holds(stage: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    virtual_size = groups.virtual_size()
    rank, chunk = groups.state().placement.homes[stage]
    if rank != groups.rank_in("pp"):
        return False
    if ignore_virtual or virtual_size is None:
        return True
    if vp_stage is None:
        raise ParallelStateError(
            f"this rank has {virtual_size} model chunks; say which one with vp_stage=, or ignore_virtual=True"
        )
    return chunk == vp_stage

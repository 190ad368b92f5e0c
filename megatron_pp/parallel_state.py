"""This process's groups, ranks, device and backend, under the names of Megatron's module of this name."""

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_pp.comm import own_groups as groups
from megatron_pp.comm.group_transport import backend_of, device_of
from megatron_pp.comm.own_groups import model_parallel_is_initialized
from megatron_pp.config.checks import whole_number
from megatron_pp.config.parallel_grid import Grid, fit_grid
from megatron_pp.errors import ConfigError, ParallelStateError
from megatron_pp.plan.ir.placement import LOOP, Placement

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

# The dimensions along which the members of a kind of group differ.
_DIMENSIONS = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "dp_cp": ("cp", "dp"), "pp": ("pp",), "mp": ("tp", "pp")}
_EMBEDDING = "embd"


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    data_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    pipeline_placement: str = LOOP,
    distributed_timeout_minutes: float = 30.0,
) -> None:
    """Make this process's groups. All ranks of the world must call it together: every rank makes every group, in one
    order, because gloo connects when a group is made.

    Ranks are numbered in Megatron's order tp-cp-dp-pp, pipeline outermost. Data parallelism takes the ranks that the
    others leave; ``data_parallel_size`` checks that number. ``pipeline_placement`` says which rank holds the last stage
    ("loop" or "v"). ``pipeline_model_parallel_comm_backend`` is the pipeline group's backend, None for the world's.

    Raises, before any communication: ParallelStateError if torch.distributed is not initialized or there are groups;
    WorldSizeError if the world does not fit the sizes; ConfigError for sizes below 1 or an unknown placement."""
    if groups.model_parallel_is_initialized():
        raise ParallelStateError("model parallel groups exist already; call destroy_model_parallel() first")
    if not dist.is_initialized():
        raise ParallelStateError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group() first"
        )
    grid = fit_grid(
        dist.get_world_size(),
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size,
        data_parallel_size,
    )
    placement = _place(pipeline_placement, pipeline_model_parallel_size, virtual_pipeline_model_parallel_size)
    timeout = timedelta(minutes=distributed_timeout_minutes)
    made, members = _make_groups(grid, placement, pipeline_model_parallel_comm_backend, timeout)
    virtual_size = virtual_pipeline_model_parallel_size
    groups.become(groups.GroupState(dist.get_rank(), virtual_size, placement, made, members))


def destroy_model_parallel() -> None:
    """Destroy the groups and forget the state, if there are any. torch.distributed stays initialized."""
    ended = groups.become(None)
    if ended is None or not dist.is_initialized():
        return
    for group in ended.groups.values():
        dist.destroy_process_group(group)


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Change V; the groups stay. Raises ConfigError for sizes below 1."""
    state = groups.state()
    placement = _place(state.placement.kind, state.placement.pipeline_size, size)
    groups.become(replace(state, virtual_size=size, placement=placement))


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that split this rank's layers. Every getter raises ParallelStateError if there are no groups."""
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
    """The ranks of this pipeline that hold its first and its last stage (one rank if it holds both).

    Raises ParallelStateError on ranks that hold neither; call is_rank_in_embedding_group first.
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
    """The backend between pipeline stages: "nccl" if the group has it and there is a GPU, else "gloo"."""
    return backend_of(groups.group_of("pp"))


def get_device() -> torch.device:
    """The device of tensors that travel between pipeline stages."""
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


def _place(kind: str, pipeline_size: int, virtual_size: int | None) -> Placement:
    if virtual_size is not None:
        whole_number("virtual_pipeline_model_parallel_size", virtual_size, hint="None for a pipeline without chunks")
    try:
        return Placement(kind, pipeline_size, virtual_size or 1)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _make_groups(
    grid: Grid, placement: Placement, pipeline_backend: str | None, timeout: timedelta
) -> tuple[dict[str, dist.ProcessGroup], dict[str, list[int]]]:
    """Make all groups, in one order on every rank; returns those that this rank is in, and their members."""
    ends = sorted({placement.homes[0][0], placement.homes[-1][0]})
    all_groups = [(kind, ranks) for kind, along in _DIMENSIONS.items() for ranks in grid.groups(*along)]
    all_groups += [(_EMBEDDING, [pipeline[end] for end in ends]) for pipeline in grid.groups("pp")]
    made: dict[str, dist.ProcessGroup] = {}
    members: dict[str, list[int]] = {}
    for kind, ranks in all_groups:
        backend = pipeline_backend if kind == "pp" else None
        group = dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=f"{kind}_{ranks[0]}")
        if dist.get_rank() in ranks:
            made[kind], members[kind] = group, ranks
    return made, members

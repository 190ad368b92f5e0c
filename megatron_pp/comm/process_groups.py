"""Who am I: this process's groups, ranks, device and backend, under the names of Megatron's module of this name.

As there, the state belongs to the process. Ranks that run as threads of one process do not use this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_pp.comm.transport import backend_of
from megatron_pp.config.checks import whole_number
from megatron_pp.config.parallel_grid import Grid, fit_grid
from megatron_pp.errors import ConfigError, ParallelStateError
from megatron_pp.plan.placement import LOOP, Placement

# The kinds of group, and the dimensions along which their members differ.
_GROUP_DIMENSIONS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "dp_cp": ("cp", "dp"),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
}
_EMBEDDING = "embd"


@dataclass(frozen=True)
class _State:
    """What initialize_model_parallel worked out. ``groups`` and ``members`` (global ranks) are keyed by kind.

    The embedding group is absent on ranks that hold neither the first nor the last stage.
    """

    grid: Grid
    rank: int
    virtual_size: int | None
    placement: Placement
    groups: Mapping[str, dist.ProcessGroup]
    members: Mapping[str, list[int]]

    def world_size(self, kind: str) -> int:
        return len(self.members[kind])

    def rank_in(self, kind: str) -> int:
        return self.members[kind].index(self.rank)


_state: _State | None = None


# -- making and ending ---------------------------------------------------------------------------------------------


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
    """Make this process's groups. Collective over the world: every rank makes every group, in one order, since gloo
    connects as a group is made.

    Ranks run in Megatron's order tp-cp-dp-pp, pipeline outermost; data parallelism takes what the others leave
    (``data_parallel_size`` checks it). ``pipeline_placement`` says which rank holds the last stage ("loop" or "v").
    ``pipeline_model_parallel_comm_backend`` is the pipeline group's backend, None for the world's.

    Raises, before any communication: ParallelStateError where torch.distributed is not initialized or the groups exist;
    WorldSizeError where the world does not fit the sizes; ConfigError for sizes below 1 or an unknown placement.
    """
    global _state
    if _state is not None:
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
    groups, members = _make_groups(grid, placement, pipeline_model_parallel_comm_backend, timeout)
    _state = _State(grid, dist.get_rank(), virtual_pipeline_model_parallel_size, placement, groups, members)


def destroy_model_parallel() -> None:
    """Destroy the groups and forget the state. Nothing happens where there is none; torch.distributed stays."""
    global _state
    state, _state = _state, None
    if state is None or not dist.is_initialized():
        return
    for group in state.groups.values():
        dist.destroy_process_group(group)


def model_parallel_is_initialized() -> bool:
    """Whether initialize_model_parallel has been called."""
    return _state is not None


# -- groups --------------------------------------------------------------------------------------------------------


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that split this rank's layers. Every getter raises ParallelStateError where there are no groups."""
    return _group("tp")


def get_context_parallel_group() -> dist.ProcessGroup:
    """The ranks that split this rank's sequences."""
    return _group("cp")


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The ranks that hold the same parameters and see other samples (with context parallelism: or parts of samples)."""
    return _group(_data_kind(with_context_parallel))


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """The ranks of this rank's pipeline, in order."""
    return _group("pp")


def get_model_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold one replica of the model: tensor and pipeline parallel together."""
    return _group("mp")


def get_embedding_group() -> dist.ProcessGroup:
    """The ranks of this pipeline that hold its first and its last stage (one rank where they share it).

    Raises ParallelStateError on ranks that hold neither; ask is_rank_in_embedding_group first.
    """
    return _group(_EMBEDDING)


# -- ranks and sizes -----------------------------------------------------------------------------------------------


def get_tensor_model_parallel_world_size() -> int:
    return _get().world_size("tp")


def get_tensor_model_parallel_rank() -> int:
    return _get().rank_in("tp")


def get_context_parallel_world_size() -> int:
    return _get().world_size("cp")


def get_context_parallel_rank() -> int:
    return _get().rank_in("cp")


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return _get().world_size(_data_kind(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return _get().rank_in(_data_kind(with_context_parallel))


def get_pipeline_model_parallel_world_size() -> int:
    return _get().world_size("pp")


def get_pipeline_model_parallel_rank() -> int:
    return _get().rank_in("pp")


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first rank of this pipeline."""
    return _get().members["pp"][0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last rank of this pipeline."""
    return _get().members["pp"][-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the pipeline neighbour after this one, round the end."""
    return _neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the pipeline neighbour before this one, round the start."""
    return _neighbour(-1)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """V, or None without virtual pipelining or before initialization."""
    return None if _state is None else _state.virtual_size


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Change V; the groups stay. Raises ConfigError for sizes below 1."""
    global _state
    state = _get()
    placement = _place(state.placement.kind, state.placement.pipeline_size, size)
    _state = dataclasses.replace(state, virtual_size=size, placement=placement)


# -- stages --------------------------------------------------------------------------------------------------------


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or with ``ignore_virtual=False`` its chunk ``vp_stage``, holds the model's first stage."""
    return _holds(0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, or with ``ignore_virtual=False`` its chunk ``vp_stage``, holds the model's last stage."""
    return _holds(_get().placement.num_stages - 1, ignore_virtual, vp_stage)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (this chunk of it) holds the first or the last stage."""
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(ignore_virtual, vp_stage)


# -- device and backend --------------------------------------------------------------------------------------------


def get_backend() -> str:
    """What carries tensors between pipeline stages: "nccl" where the group has it and there is a GPU, else "gloo"."""
    return backend_of(_get().groups["pp"])


def get_device() -> torch.device:
    """Where tensors that travel between pipeline stages lie."""
    return torch.device("cuda", torch.cuda.current_device()) if get_backend() == "nccl" else torch.device("cpu")


# -- inside --------------------------------------------------------------------------------------------------------


def _get() -> _State:
    if _state is None:
        raise ParallelStateError("model parallel groups do not exist; call initialize_model_parallel() first")
    return _state


def _group(kind: str) -> dist.ProcessGroup:
    state = _get()
    if kind not in state.groups:
        raise ParallelStateError(f"rank {state.rank} is not in a group {kind!r}: it holds neither first nor last stage")
    return state.groups[kind]


def _data_kind(with_context_parallel: bool) -> str:
    return "dp_cp" if with_context_parallel else "dp"


def _neighbour(step: int) -> int:
    ranks = _get().members["pp"]
    return ranks[(_get().rank_in("pp") + step) % len(ranks)]


def _holds(stage: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    state = _get()
    rank, chunk = state.placement.homes[stage]
    if rank != state.rank_in("pp"):
        return False
    if ignore_virtual or state.virtual_size is None:
        return True
    if vp_stage is None:
        raise ParallelStateError(
            f"this rank has {state.virtual_size} model chunks; say which one with vp_stage=, or ignore_virtual=True"
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
    """Every rank walks the same lists of ranks; what comes back is the groups this rank is in, and who else is."""
    groups: dict[str, dist.ProcessGroup] = {}
    members: dict[str, list[int]] = {}
    for kind, ranks in _all_groups(grid, placement):
        backend = pipeline_backend if kind == "pp" else None
        group = dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=f"{kind}_{ranks[0]}")
        if dist.get_rank() in ranks:
            groups[kind], members[kind] = group, ranks
    return groups, members


def _all_groups(grid: Grid, placement: Placement) -> list[tuple[str, list[int]]]:
    ends = sorted({placement.homes[0][0], placement.homes[-1][0]})
    listed = [(kind, ranks) for kind, along in _GROUP_DIMENSIONS.items() for ranks in grid.groups(*along)]
    return listed + [(_EMBEDDING, [pipeline[end] for end in ends]) for pipeline in grid.groups("pp")]

"""This process's model-parallel groups; ``megatron_pp.parallel_state`` has Megatron's functions for them.

The state belongs to the process, as in Megatron. Ranks that run as threads of one process do not use this module.

Kinds of group: tp (tensor), cp (context), dp (data), dp_cp (both), pp (pipeline), mp (tensor and pipeline), embd (the
ranks of a pipeline that hold its first and its last stage). Functions raise ParallelStateError where there are none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from megatron_pp.config.checks import whole_number
from megatron_pp.config.parallel_grid import Grid, fit_grid
from megatron_pp.errors import ConfigError, ParallelStateError
from megatron_pp.plan.ir.placement import LOOP, Placement

# The dimensions along which the members of a kind of group differ.
_DIMENSIONS = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "dp_cp": ("cp", "dp"), "pp": ("pp",), "mp": ("tp", "pp")}
_EMBEDDING = "embd"


@dataclass(frozen=True)
class _State:
    """``groups`` and ``members`` (global ranks) of this rank, by kind."""

    rank: int
    virtual_size: int | None
    placement: Placement
    groups: Mapping[str, dist.ProcessGroup]
    members: Mapping[str, list[int]]


_state: _State | None = None


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
    WorldSizeError where the world does not fit the sizes; ConfigError for sizes below 1 or an unknown placement."""
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
    _state = _State(dist.get_rank(), virtual_pipeline_model_parallel_size, placement, groups, members)


def destroy_model_parallel() -> None:
    """Destroy the groups and forget the state. Nothing happens where there is none; torch.distributed stays."""
    global _state
    ended, _state = _state, None
    if ended is None or not dist.is_initialized():
        return
    for group in ended.groups.values():
        dist.destroy_process_group(group)


def model_parallel_is_initialized() -> bool:
    return _state is not None


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Change V; the groups stay. Raises ConfigError for sizes below 1."""
    global _state
    placement = _place(state().placement.kind, state().placement.pipeline_size, size)
    _state = replace(state(), virtual_size=size, placement=placement)


def state() -> _State:
    if _state is None:
        raise ParallelStateError("model parallel groups do not exist; call initialize_model_parallel() first")
    return _state


def group_of(kind: str) -> dist.ProcessGroup:
    """This rank's group of ``kind``."""
    if kind not in state().groups:
        raise ParallelStateError(
            f"rank {state().rank} is not in a group {kind!r}: it holds neither first nor last stage"
        )
    return state().groups[kind]


def size_of(kind: str) -> int:
    """The number of ranks in this rank's group of ``kind``."""
    return len(state().members[kind])


def rank_in(kind: str) -> int:
    """This rank's number in its group of ``kind``."""
    return state().members[kind].index(state().rank)


def virtual_size() -> int | None:
    """V, or None without virtual pipelining or before initialization."""
    return None if _state is None else _state.virtual_size


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
    groups: dict[str, dist.ProcessGroup] = {}
    members: dict[str, list[int]] = {}
    for kind, ranks in all_groups:
        backend = pipeline_backend if kind == "pp" else None
        group = dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=f"{kind}_{ranks[0]}")
        if dist.get_rank() in ranks:
            groups[kind], members[kind] = group, ranks
    return groups, members

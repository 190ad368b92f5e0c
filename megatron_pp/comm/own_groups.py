"""The model-parallel groups that this library's ``parallel_state`` has made for this process. ``parallel_state`` also
has Megatron's functions for them. Under Megatron there are no such groups.

The state belongs to the process, as in Megatron. Ranks that run as threads of one process do not use this module.

Kinds of group: tp (tensor), cp (context), dp (data), dp_cp (both), pp (pipeline), mp (tensor and pipeline), embd (the
ranks of a pipeline that hold its first and its last stage). Functions raise ParallelStateError where there are none.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from megatron_pp.errors import ParallelStateError, ScheduleInputError
from megatron_pp.plan.ir.placement import Placement


@dataclass(frozen=True)
class GroupState:
    """``groups`` and ``members`` (global ranks) of this rank, by kind."""

    rank: int
    virtual_size: int | None
    placement: Placement
    groups: Mapping[str, dist.ProcessGroup]
    members: Mapping[str, list[int]]


_state: GroupState | None = None


def become(state: GroupState | None) -> GroupState | None:
    """Make ``state`` this process's state; returns the previous one."""
    global _state
    before, _state = _state, state
    return before


def model_parallel_is_initialized() -> bool:
    return _state is not None


def state() -> GroupState:
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


def pipeline(alone: bool) -> dist.ProcessGroup | None:
    """This rank's pipeline group, if the groups exist. Without groups: None for a rank ``alone``; else raises
    ScheduleInputError."""
    if _state is not None:
        return group_of("pp")
    if not alone:
        raise ScheduleInputError(
            "neither p2p_communicator nor pg_collection.pp was given and megatron_pp.parallel_state is not "
            "initialised; call parallel_state.initialize_model_parallel(pipeline_model_parallel_size=...) after "
            "torch.distributed.init_process_group"
        )
    return None


def size_of(kind: str) -> int:
    """The number of ranks in this rank's group of ``kind``."""
    return len(state().members[kind])


def rank_in(kind: str) -> int:
    """This rank's number in its group of ``kind``."""
    return state().members[kind].index(state().rank)


def virtual_size() -> int | None:
    """V, or None without virtual pipelining or before initialization."""
    return None if _state is None else _state.virtual_size

"""This process's groups, ranks, device and backend, under the names of Megatron's module of this name."""

from __future__ import annotations

from megatron_pp.comm import process_groups
from megatron_pp.comm.process_groups import *  # noqa: F403
from megatron_pp.errors import ParallelStateError

__all__ = ["ParallelStateError"]
__all__ += process_groups.__all__

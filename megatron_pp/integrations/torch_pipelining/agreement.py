"""Exchanges between ranks with torch's stages before a step, by collectives of the pipeline's group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_pp.errors import MegatronPPError, ScheduleInputError


class RefusedError(MegatronPPError):
    """The step does not begin, and all ranks know it. This rank raises ``error``. The communicator stays usable."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Ranks:
    """The ranks of a pipeline ``group``; ``device``: of this rank's stages. Each method is collective."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group = group
        self.size: int = group.size()
        self.device = None if dist.get_backend(group) == "gloo" else device

    def any_of(self, own: Sequence[bool]) -> list[bool]:
        """For each place of ``own``, whether any rank has True there."""
        if self.size == 1:
            return list(own)
        flags = torch.tensor([int(one) for one in own], dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
        return [bool(one) for one in flags.tolist()]

    def of_rank(self, rank: int, value: Any) -> Any:
        """The ``value`` that ``rank`` gives."""
        objects = [value]
        if self.size > 1:
            dist.broadcast_object_list(objects, dist.get_global_rank(self.group, rank), self.group, self.device)
        return objects[0]

    def refuse(self, problem: Exception | None) -> None:
        """Raises RefusedError. ``problem`` is the error of this rank's input; if only another rank has a problem, the
        error is a ScheduleInputError that names it. Called if any rank has a problem."""
        refused = []
        for rank in range(self.size):
            refused.append(self.of_rank(rank, None if problem is None else f"{type(problem).__name__}: {problem}"))
        if problem is not None:
            raise RefusedError(problem)
        for rank, why in enumerate(refused):
            if why is not None:
                raise RefusedError(ScheduleInputError(f"pipeline rank {rank} cannot begin the step: {why}"))

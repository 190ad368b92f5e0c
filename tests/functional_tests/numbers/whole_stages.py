"""Compares the memory of whole stages under FSDP2 with the plan's count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from megatron_pp.features.fsdp.fsdp_instructions import WAIT_UNSHARD
from megatron_pp.features.fsdp.fsdp_runner import FsdpRunner
from megatron_pp.features.fsdp.shard_memory import whole_stages
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from megatron_pp.testing.toy import HIDDEN

STAGE_BYTES = 4 * (HIDDEN * HIDDEN + 2 * HIDDEN)
"""Bytes of a ToyBlock's parameters; their gradients have as many."""


@contextmanager
def watched(rank: int, most: int | None) -> Iterator[None]:
    """Assert that the bytes of whole parameters and gradients after each instruction of a rank's steps are those that
    the plan counts, and that at most ``most`` stages are whole. Stages must be ToyBlocks."""
    watch, original = _Watch(), FsdpRunner.attach

    def attach(runner: FsdpRunner, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        original(runner, engine, handlers)
        watch.attach(runner, engine, handlers)

    FsdpRunner.attach = attach  # type: ignore[method-assign]
    try:
        yield
    finally:
        FsdpRunner.attach = original  # type: ignore[method-assign]
    off = watch.differences(rank, most)
    assert not off, "\n".join(off[:10])


class _Watch:
    """Bytes of whole parameters and gradients of a rank's stages after each instruction of the last step."""

    def __init__(self) -> None:
        self.plan: Any = None
        self.parameters: dict[int, list[torch.Tensor]] = {}  # by stage, as FSDP2 keeps them from then on
        self.after: list[tuple[int, int]] = []

    def attach(self, runner: FsdpRunner, engine: PlanExecutor, handlers: dict[str, Handler]) -> None:
        self.plan = engine.plan
        self.parameters.clear()
        self.after.clear()
        for op, handler in list(handlers.items()):
            handlers[op] = partial(self._run, runner, handler)

    def _run(self, runner: FsdpRunner, handler: Handler, at: Any) -> None:
        handler(at)
        if at.op == WAIT_UNSHARD and at.stage not in self.parameters:
            modules = runner.stages[at.chunk].modules
            self.parameters[at.stage] = [p for module in modules for p in module.parameters(recurse=False)]
            for child in (child for module in modules for child in module.children()):
                if not isinstance(child, FSDPModule):
                    self.parameters[at.stage] += child.parameters()
        whole = [parameter for found in self.parameters.values() for parameter in found]
        self.after.append(
            (
                sum(parameter.untyped_storage().nbytes() for parameter in whole),
                sum(parameter.grad.nbytes for parameter in whole if parameter.grad is not None),
            )
        )

    def differences(self, rank: int, most: int | None) -> list[str]:
        """Return the differences from the plan's count, as text."""
        parameters, gradients = (list(map(len, part)) for part in whole_stages(self.plan, rank))
        arriving = reducing = 0
        off = []
        for k, at in enumerate(self.plan.programs[rank]):
            arriving += {"UNSHARD": 1, "WAIT_UNSHARD": -1}.get(at.op, 0)  # whole after the wait
            reducing += {"REDUCE_GRAD": 1, "WAIT_REDUCE_GRAD": -1}.get(at.op, 0)  # in buffers of the reduction
            expected = STAGE_BYTES * (parameters[k] - arriving), STAGE_BYTES * (gradients[k] - reducing)
            if self.after[k] != expected:
                off.append(f"memory of whole stages after {at} at {k} is {self.after[k]}, not {expected}")
        if most and max(parameters) > most:
            off.append(f"{max(parameters)} stages are whole")
        return off

"""Lets random instructions wait for an idle device, in the verifier's run loop and in the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.spec import ANY_WAIT, ONE_QUEUE, Plan
from megatron_pp.plan.ir.tasks import Task
from megatron_pp.plan.verify.queues import Entry
from megatron_pp.plan.verify.rendezvous import RendezvousRun
from megatron_pp.runtime.engine.executor import Handler, PlanExecutor
from testkit.streams.device import current_device


def drawn_waits(plan: Plan, share: float, rng: random.Random, compute: bool) -> list[set[int]]:
    """By rank, the places of the instructions that wait. Each waits with probability ``share``. ``compute``: only
    compute operations wait."""
    return [
        {k for k, at in enumerate(program) if rng.random() < share and (at.op in ins.COMPUTE_OPS or not compute)}
        for program in plan.programs
    ]


class _Waiting(RendezvousRun):
    """The run loop in which chosen instructions wait for all that their rank has posted."""

    def __init__(self, plan: Plan, waits: Sequence[Collection[int]]) -> None:
        self.waits = waits
        super().__init__(plan, [ONE_QUEUE, ANY_WAIT], 1)

    def unfinished(self, rank: int) -> list[Entry]:
        return super().unfinished(rank) if self.at[rank] in self.waits[rank] else []


def check_with_waits(plan: Plan, waits: Sequence[Collection[int]]) -> None:
    """Raises PlanError if ``plan`` hangs when these instructions wait."""
    run = _Waiting(plan, waits)
    run.upto([len(program) for program in plan.programs])
    run.check_end()


class WaitsAsDrawn(PlanExecutor):
    """An engine whose instructions wait for an idle device before they run, each with probability ``share``. ``seed``
    chooses."""

    share, seed = 1.0, 0

    def _handlers(self) -> dict[str, Handler]:
        rng = random.Random(f"{self.seed} {self.rank}")
        return {op: partial(self._waiting, handler, rng.random) for op, handler in super()._handlers().items()}

    def _waiting(self, handler: Handler, draw: Callable[[], float], at: Task) -> None:
        device = current_device()
        if device is not None and draw() < self.share:
            device.wait_until_idle(f"{at.instruction}")
        handler(at)


def waiting_engine(share: float, seed: int) -> type[PlanExecutor]:
    fields: dict[str, Any] = {"share": share, "seed": seed}
    return type("WaitsAsDrawn", (WaitsAsDrawn,), fields)

"""Finds waits for a device that hang: a rank waits in one operation until all that it has posted is over."""

from __future__ import annotations

from typing import Any

from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import ONE_QUEUE, Plan
from megatron_pp.plan.verify.queues import Entry
from megatron_pp.plan.verify.rendezvous import RendezvousRun


class _Noting(RendezvousRun):
    """Records the posts of each rank."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, [ONE_QUEUE], 1)
        self.entries: list[list[Entry]] = [[] for _ in plan.programs]

    def _post(self, rank: int, at: Instruction, content: str) -> Any:
        entry = super()._post(rank, at, content)
        self.entries[rank].append(entry)
        return entry


def stopped(plan: Plan, rank: int, position: int) -> _Noting:
    """Run all ranks as far as possible while ``rank`` stops before its instruction ``position``."""
    run = _Noting(plan)
    limits = [len(program) for program in plan.programs]
    limits[rank] = position
    run.upto(limits)
    return run


def hanging_waits(plan: Plan) -> list[tuple[int, str]]:
    """The (rank, operation) pairs that never end if only this operation waits for its device."""
    found = []
    for rank, program in enumerate(plan.programs):
        for position, at in enumerate(program):
            if at.op in ins.COMPUTE_OPS and any(one.left for one in stopped(plan, rank, position).entries[rank]):
                found.append((rank, str(at)))
    return found

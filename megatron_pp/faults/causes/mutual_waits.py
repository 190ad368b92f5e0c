"""Finds operations that wait for each other's messages, on ranks whose hosts run ahead of their devices.

A call of CUDA may wait until the device is idle: a kernel's first launch, an allocation that gives cached blocks back,
a synchronisation in the user's code. The device is not idle while it has an unfinished receive. So two ranks hang if
each is in such a call and has posted a receive whose message the other rank sends after its call. Both hosts are then
in compute, and their positions look like those of two long computations. Three facts tell them apart:

* The hosts form a cycle: each has posted a receive whose message the next host sends only after its current operation.
  Plans that are verified for any wait have no such cycle at any position.
* A host in a waiting call does nothing else: its threads, autograd's included, stay at one place in their Python code.
  A host that compiles or computes in Python moves (``TrackerOfDevice.host``).
* Its device has done all that was issued before, except transfers. A device that runs a long kernel has not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_pp.faults.position.places import instruction_at
from megatron_pp.faults.store.records import NO_HOST, Progress
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.verify.rendezvous import standstill

REMEDY = (
    "An operation that waits for an idle device (a kernel's first launch, memory that is given back, a "
    "synchronisation) waits for all receives that are posted. Set config.device_sync to None, the default: then "
    "receives are posted so that no such wait can hang; or to True: then none is posted ahead"
)


class Wait(NamedTuple):
    """``rank`` has posted ``receive``, whose message rank ``sender`` has not sent yet."""

    rank: int
    receive: Instruction
    sender: int


def find(plan: Plan, step: int, where: Mapping[int, Progress], timeout: float) -> tuple[str, tuple[int, ...]]:
    """The operations in ``step``, which runs ``plan``, that have waited for each other's messages for ``timeout``
    seconds, in words, and their ranks; "" and () if there are none. ``where``: the progress of every rank."""
    size = len(plan.programs)
    if len(where) < size or any(progress.step < step for progress in where.values()):
        return "", ()  # a rank is not in the step yet, and only that rank knows what it waits for
    ends = [len(program) for program in plan.programs]
    here = {rank: where[rank].host if _is_within(where[rank], step) else ends[rank] for rank in range(size)}
    stuck = {rank for rank in here if here[rank] < ends[rank] and where[rank].host_idle >= timeout}
    waits = mutual_waits(plan, here, stuck)
    return (in_words(plan, here, stuck, waits), tuple(wait.rank for wait in waits)) if waits else ("", ())


def _is_within(progress: Progress, step: int) -> bool:
    """Whether the host of a rank has not yet issued all instructions of ``step``."""
    return progress.step == step and progress.host != NO_HOST


def mutual_waits(plan: Plan, hosts: Mapping[int, int], stuck: Collection[int]) -> list[Wait]:
    """A cycle of waits: the sender of each is the rank of the next, and the sender of the last is the rank of the
    first. Empty if there is none. ``hosts``: rank -> the number of instructions that its host has issued. ``stuck``:
    the ranks whose hosts may wait for their devices, and so for all posted receives. Other ranks wait for a message
    only where their program does."""
    # A send that was freed may still be pending, so a FREE does not always block a rank.
    programs = [
        tuple(at for at in program[: hosts[rank]] if at.op not in ins.FREE_OPS)
        for rank, program in enumerate(plan.programs)
    ]
    pending, awaited = standstill(replace(plan, programs=programs))
    waits: dict[int, list[Wait]] = {}
    for rank in range(len(programs)):
        receives = (pending if rank in stuck else awaited).get(rank, [])
        waits[rank] = [Wait(rank, at, at.peer) for at in receives if at.op in ins.RECV_OPS]
    seen: set[int] = set()
    return next((cycle for rank in waits if (cycle := _cycle_from(rank, waits, [], seen))), [])


def _cycle_from(rank: int, waits: Mapping[int, Sequence[Wait]], path: list[Wait], seen: set[int]) -> list[Wait]:
    """The waits of a cycle that can be reached from ``rank``. ``path``: the waits that lead to ``rank``. ``seen``:
    ranks that need not be visited again."""
    start = next((k for k, wait in enumerate(path) if wait.rank == rank), None)
    if start is not None:
        return path[start:]
    if rank in seen:
        return []
    seen.add(rank)
    return next((c for wait in waits[rank] if (c := _cycle_from(wait.sender, waits, [*path, wait], seen))), [])


def in_words(plan: Plan, hosts: Mapping[int, int], stuck: Collection[int], waits: Sequence[Wait]) -> str:
    """The message: which operations wait for each other, and which setting prevents it."""
    lines = []
    for wait in waits:
        at = instruction_at(plan, wait.rank, hosts[wait.rank])
        if wait.rank in stuck and at is not None:
            lines.append(f"rank {wait.rank} is in {at} ({at.name}) and has posted {wait.receive}")
        else:
            lines.append(f"rank {wait.rank} waits for {wait.receive}")
        lines[-1] += f", whose message rank {wait.sender} has not sent"
    return f"operations wait for each other's messages: {'; '.join(lines)}. {REMEDY}"

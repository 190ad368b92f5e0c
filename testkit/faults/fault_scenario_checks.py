"""Checks the reports of an episode: every rank must raise the right error in time, with the right place, or raise none
and have the right numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.dataflow import message_of
from megatron_pp.plan.ir.instruction import FREE_B, FREE_F, WAIT_B, WAIT_F, Instruction
from megatron_pp.plan.ir.spec import BATCHED, OVERLAP, PLAIN, Plan, PlanSpec
from testkit.faults.fault_injection import DELAY, HOLD, KILL, MEMORY, OWN_ERRORS, SHAPE, STOP, Fault
from testkit.faults.fault_scenarios import Episode, Report, Resources

# Seconds within which the other ranks must raise.
EXCEPTION_SECONDS = 5.0
KILL_SECONDS = 10.0
STOP_SECONDS = 5.0  # seconds beyond the limit of a stopped process

CACHED_TENSORS = 2  # tensors that a process makes once and keeps, such as those that replace deallocated outputs

_TYPES = {SHAPE: "P2PShapeError", MEMORY: "OutOfMemoryError"}
_AT = re.compile(r"step (\d+), .* \((\S+|\[.+?\]), instruction \d+ of \d+\)")
# Waiting operation -> the direction of its partner, and the partner's operation that shows that the message has passed.
_PARTNER = {WAIT_F: FREE_F, WAIT_B: FREE_B, FREE_F: WAIT_F, FREE_B: WAIT_B}


def complaints(episode: Episode, reports: Mapping[int, Report], size: int, slack: float = 0.0) -> list[str]:
    """The faults in the reports of an episode; empty if there are none. ``slack``: seconds by which a loaded machine
    may exceed the limits.
    """
    found = [
        f"rank {r}: wrong numbers in steps {report.wrong_steps}" for r, report in reports.items() if report.wrong_steps
    ]
    found += [f"rank {rank} gave no report" for rank in range(size) if rank not in reports]
    fault = episode.fault
    if fault is None or fault.kind in (DELAY, HOLD):
        found += _undisturbed(episode, reports)
    elif fault.kind in OWN_ERRORS:
        found += _one_exception(_instruction(episode, fault, size), fault, reports, slack)
    else:
        found += _stall(episode, fault, reports, size, slack)
    return found


def seconds_to_detect(episode: Episode, reports: Mapping[int, Report]) -> dict[int, float]:
    """By rank: the seconds from the fault until another rank has raised."""
    fault = episode.fault
    return {
        rank: report.raised_at - report.fired_at
        for rank, report in reports.items()
        if report.error is not None and report.fired_at is not None and fault is not None and rank != fault.rank
    }


def limit(episode: Episode) -> float:
    """The seconds within which all other ranks must have raised."""
    assert episode.fault is not None
    if episode.fault.kind == STOP:
        return min(episode.p2p_timeout, max(episode.stopped_seconds, episode.p2p_timeout / 8)) + STOP_SECONDS
    return KILL_SECONDS if episode.fault.kind == KILL else EXCEPTION_SECONDS


def leaks(before: Resources, after: Resources) -> list[str]:
    """The resources of which a process holds more after an episode than after an earlier one. Memory is checked
    elsewhere, over many episodes."""
    allowed = {"threads": 0, "files": 0, "shared_memory": 0, "handles": 0, "tensors": CACHED_TENSORS}
    return [
        f"{name}: {getattr(before, name)} before, {getattr(after, name)} after"
        for name, more in allowed.items()
        if getattr(after, name) > getattr(before, name) + more
    ]


def _undisturbed(episode: Episode, reports: Mapping[int, Report]) -> Iterator[str]:
    for rank, report in reports.items():
        if report.error is not None:
            yield f"rank {rank}: raised {report.error[0]} although nothing was wrong: {report.error[1]}"
        elif report.steps_done != episode.steps:
            yield f"rank {rank}: did {report.steps_done} of {episode.steps} steps"


def _instruction(episode: Episode, fault: Fault, size: int) -> str:
    """The instruction in which the fault happens. The plan may split a backward."""
    program = {str(at) for at in build_plan(_spec_of(episode, size)).programs[fault.rank]}
    return fault.instruction if fault.instruction in program else f"I{fault.instruction[1:]}"


def _one_exception(instruction: str, fault: Fault, reports: Mapping[int, Report], slack: float) -> Iterator[str]:
    kind = _TYPES.get(fault.kind, "InjectedError")
    place = f"chunk {fault.chunk}, microbatch {fault.mb}"
    words = f"chunk {fault.chunk} for microbatch {fault.mb}" if fault.kind == SHAPE else fault.message
    for rank, report in reports.items():
        if report.error is None:
            yield f"rank {rank}: raised nothing"
            continue
        name, text, attributes = report.error
        late = report.raised_at - (report.fired_at or 0.0) > EXCEPTION_SECONDS + slack
        if rank == fault.rank:
            wanted: dict[str, Any] = {}
            right = name == kind and words in text
        else:
            wanted = {"rank": fault.rank, "instruction": instruction}
            who = f"pipeline rank {fault.rank} (global rank {fault.rank}) raised"
            right = name == "PipelinePeerError" and who in text and kind in text and place in text and words in text
        if not right or any(attributes.get(key) != value for key, value in wanted.items()):
            yield f"rank {rank}: raised {name}: {text!r} {attributes}"
        if late:
            yield f"rank {rank}: raised only after {report.raised_at - (report.fired_at or 0.0):.1f} s"


def _stall(episode: Episode, fault: Fault, reports: Mapping[int, Report], size: int, slack: float) -> Iterator[str]:
    plan = build_plan(_spec_of(episode, size))
    waiting = 0
    for rank, report in reports.items():
        if rank == fault.rank and fault.kind == KILL:
            continue
        if report.error is None:
            yield f"rank {rank}: raised nothing"
            continue
        name, text, attributes = report.error
        if name != "PipelineStallError" or fault.rank not in attributes.get("suspects", ()):
            yield f"rank {rank}: raised {name}: {text!r} {attributes}"
            continue
        if rank == fault.rank:
            continue
        if report.raised_at - (report.fired_at or 0.0) > limit(episode) + slack:
            yield f"rank {rank}: raised only after {report.raised_at - (report.fired_at or 0.0):.1f} s"
        line = attributes["progress"].get(rank, "")
        waiting += any(f"{word} rank {fault.rank}" in line for word in ("from", "for", "to"))
        yield from _wrongly_described(plan, fault, rank, line)
    if not waiting:
        lines = {rank: report.error[2].get("progress") for rank, report in reports.items() if report.error}
        yield f"no rank says that it waits for rank {fault.rank}: {lines}"


def _wrongly_described(plan: Plan, fault: Fault, rank: int, line: str) -> Iterator[str]:
    """If a rank reports that it waits for the faulty rank, it must wait for an instruction that this rank has not
    reached."""
    at = _AT.match(line)
    if at is None:
        yield f"rank {rank}: no instruction in its line {line!r}"
        return
    if int(at.group(1)) != fault.step:
        return  # the rank had finished the step, and waits in the next one
    waits = at.group(2)
    partner = _partner(plan, rank, waits)
    if partner is None or partner[0] != fault.rank:
        return
    _, done = partner
    if fault.kind == KILL and done.op in (FREE_F, FREE_B):
        return  # a reset connection loses sent bytes that were not read; the connection of a stopped rank is not reset
    program = list(plan.programs[fault.rank])
    if program.index(done) < [str(one) for one in program].index(fault.instruction):
        yield f"rank {rank}: at {waits}, whose partner did {done} before it failed in {fault.instruction}"


def _spec_of(episode: Episode, size: int) -> PlanSpec:
    """The spec of the plan for the episode's config."""
    fields = episode.fields
    policy = OVERLAP if fields.get("overlap_p2p_comm") else BATCHED if fields.get("batch_p2p_comm") else PLAIN
    return PlanSpec(episode.schedule, size, episode.chunks, episode.microbatches, size, policy)


def _partner(plan: Plan, rank: int, at: str) -> tuple[int, Instruction] | None:
    """The other end of the message for which ``at`` waits: its rank, and its instruction that waits for the same
    message."""
    waits = next(one for one in plan.programs[rank] if str(one) == at)
    if waits.op not in _PARTNER:
        return None
    op = _PARTNER[waits.op]
    message = message_of(waits)
    theirs = (one for one in plan.programs[waits.peer] if one.op == op)
    return waits.peer, next(one for one in theirs if message_of(one) == message)

"""In words: what each rank waits for, where it was last, and its last instructions beside the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_pp.faults.records import DONE, ENTERING, IN_STEP, Progress
from megatron_pp.plan import instruction as ins
from megatron_pp.plan.instruction import NONE, Instruction
from megatron_pp.plan.spec import Plan

_BEFORE, _AFTER = 6, 3


class Source(Protocol):
    """What a step is watched through: the engine's ``PlanExecutor`` is one. ``position`` is the index of the current
    instruction; ``plan`` is None for what follows no plan.
    """

    @property
    def plan(self) -> Plan | None: ...

    @property
    def position(self) -> int: ...


def waits_on(at: Instruction) -> tuple[int, ...]:
    """Pipeline ranks whose part in a transfer ``at`` may have to wait for; empty for compute."""
    return tuple(sorted({one.peer for one in at.members or (at,) if one.peer != NONE}))


_WORDS = {
    ins.WAIT_F: "waits for the activation of {where} from rank {peer}",
    ins.WAIT_B: "waits for the gradient of {where} from rank {peer}",
    ins.FREE_F: "waits for rank {peer} to take the activation of {where}",
    ins.FREE_B: "waits for rank {peer} to take the gradient of {where}",
}


def doing(at: Instruction) -> str:
    """What a rank does in instruction ``at``: ``waits for the activation of chunk 1, microbatch 3 from rank 1``."""
    if at.op in _WORDS:
        return _WORDS[at.op].format(where=f"chunk {at.chunk}, microbatch {at.mb}", peer=at.peer)
    return f"is in {at.name}"


def instruction_at(plan: Plan, rank: int, position: int) -> Instruction | None:
    """The instruction at ``position`` of ``rank``'s program; None beyond its ends."""
    program = plan.programs[rank] if 0 <= rank < len(plan.programs) else ()
    return program[position] if 0 <= position < len(program) else None


def progress_line(plan: Plan | None, rank: int, progress: Progress | None, idle: float | None) -> str:
    """One line on where ``rank`` last was. ``idle``: seconds since it moved, None if unknown."""
    if progress is None:
        return f"rank {rank}: has not reported since this rank looks for it"
    ago = "" if idle is None else f" {max(idle, 0.0):.1f} s ago"
    if progress.state == DONE:
        return f"rank {rank}: finished step {progress.step}{ago}"
    if progress.state == ENTERING:
        return f"rank {rank}: entered step {progress.step}{ago} and compares plans with the others"
    at = instruction_at(plan, rank, progress.position) if plan is not None else None
    if plan is None or at is None or str(at) != progress.text:
        return f"rank {rank}: step {progress.step}, {progress.text or 'no instruction'}; last moved{ago}"
    what = doing(at)
    place = f"{at}, instruction {progress.position + 1} of {len(plan.programs[rank])}"
    return f"rank {rank}: step {progress.step}, {what} ({place}); last moved{ago}"


def busy_ranks(plan: Plan, positions: Mapping[int, int]) -> tuple[int, ...]:
    """Ranks that wait for nobody: where none moves, it is they who hold the others up."""
    found = []
    for rank, position in sorted(positions.items()):
        at = instruction_at(plan, rank, position)
        if at is not None and at.op in ins.COMPUTE_OPS:
            found.append(rank)
    return tuple(found)


def working_ranks(plan: Plan | None, where: Mapping[int, Progress]) -> tuple[int, ...]:
    """Ranks that are in work of their own, or of the user's code, rather than in a transfer: in the plan, or in what
    follows it within the step."""
    found = []
    for rank, progress in sorted(where.items()):
        if progress.state != IN_STEP:
            continue
        at = instruction_at(plan, rank, progress.position) if plan is not None else None
        if plan is None or at is None or str(at) != progress.text or not waits_on(at):
            found.append(rank)
    return tuple(found)


def beside_the_plan(plan: Plan, positions: Mapping[int, int]) -> str:
    """Each rank's program around its position, the current instruction between ``>`` and ``<``."""
    return "\n".join(f"rank {rank}: {_window(plan.programs[rank], at)}" for rank, at in sorted(positions.items()))


def _window(program: Sequence[Instruction], position: int) -> str:
    start, stop = max(0, position - _BEFORE), min(len(program), position + 1 + _AFTER)
    words = [f">{at}<" if k == position else str(at) for k, at in enumerate(program[start:stop], start)]
    return " ".join((["..."] if start > 0 else []) + words + (["..."] if stop < len(program) else []))


def stall_text(
    rank: int, plan: Plan | None, own: Progress, seen: Mapping[int, tuple[Progress, float]], size: int, why: str
) -> str:
    """The message of a PipelineStallError. ``seen``: other ranks' progress, and seconds since
    they moved."""
    where = {**seen, rank: (own, own.idle)}
    lines = {r: progress_line(plan, r, *where.get(r, (None, None))) for r in range(size)}
    head = f"pipeline stalled: {why}. {_headline(rank, plan, own, seen)}".rstrip()
    parts = [head, "Where each rank was:", *(f"  {lines[r]}" for r in range(size))]
    positions = {r: p.position for r, (p, _) in where.items() if p.state == IN_STEP and p.step == own.step}
    if plan is not None and positions:
        window = beside_the_plan(plan, positions)
        parts += ["Beside the plan:", *(f"  {line}" for line in window.splitlines())]
    return "\n".join(parts)


def _headline(rank: int, plan: Plan | None, own: Progress, seen: Mapping[int, tuple[Progress, float]]) -> str:
    """``rank 2 waits for the activation of chunk 1, microbatch 3 from rank 1, which last reported FORWARD of ..., 41 s
    ago``."""
    at = instruction_at(plan, rank, own.position) if plan is not None else None
    if plan is None or at is None or str(at) != own.text:
        return f"rank {rank}: {own.text}" if own.text else ""
    text = f"rank {rank} {doing(at)}"
    for peer in waits_on(at):
        if peer not in seen:
            text += f", which has not reported (rank {peer})"
            continue
        progress, idle = seen[peer]
        last = instruction_at(plan, peer, progress.position)
        told = f"the end of step {progress.step}" if progress.state == DONE else last.name if last else progress.text
        step = "" if progress.step == own.step or progress.state == DONE else f" in step {progress.step}"
        text += f", which last reported {told}{step}, {max(idle, 0.0):.1f} s ago"
    return text

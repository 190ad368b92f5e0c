"""What ``verify`` refuses of pairs: every wrong instruction in one, or next to one, by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir.instruction import PAIR, Instruction, instruction
from megatron_pp.plan.ir.spec import EXPLICIT, Plan, PlanSpec
from megatron_pp.plan.verify.verifier import verify

Members = tuple[Instruction, ...]


def combined(**fields: object) -> Plan:
    return build_plan(PlanSpec("combined_1f1b", 2, 2, 6, overlap_pairs=True, **fields))  # type: ignore[arg-type]


def with_members(plan: Plan, change: Callable[[Members], Members], behind: Members = ()) -> Plan:
    """Rank 0's first pair with two sends has other members; ``behind``: what then follows it."""
    program = plan.programs[0]
    k = next(i for i, at in enumerate(program) if at.op == PAIR and len(at.members) == 4)
    changed = program[k]._replace(members=change(program[k].members))
    return replace(plan, programs=((*program[:k], changed, *behind, *program[k + 1 :]), *plan.programs[1:]))


def test_what_the_faults_are_put_into_is_sound() -> None:
    plan = combined()
    verify(plan)
    verify(with_members(plan, lambda members: members))


MUTANTS = {
    "the output sent before the forward": (lambda m: (m[1], m[0], *m[2:]), "its forward ran"),
    "the gradient sent before the backward": (lambda m: (*m[:2], m[3], m[2]), "its backward ran"),
    "the output sent behind the backward": (lambda m: (m[0], m[2], m[1], m[3]), "at most its own send behind it"),
    "the backward first": (lambda m: (*m[2:], *m[:2]), "is no pair"),
    "no send of the output": (lambda m: (m[0], *m[2:]), "its output was sent"),
    "no send of the gradient": (lambda m: m[:3], "its input gradient was sent"),
    "the output sent twice": (lambda m: (m[0], m[1], m[1], *m[2:]), "it stands twice"),
    "another microbatch sent": (lambda m: (m[0], m[1]._replace(mb=m[1].mb + 1), *m[2:]), "its forward ran"),
    "a gradient sync before the last weight gradient": (
        lambda m: (*m, instruction("GRAD_SYNC", 1)._replace(stage=2)),
        "needs the pair's last weight gradient",
    ),
    "a release within": (lambda m: (*m[:2], m[1]._replace(op="FREE_F"), *m[2:]), "it stands twice"),
    "a wait within": (lambda m: (m[2]._replace(op="WAIT_B", peer=1), *m), "already: it stands twice"),
    "a pair without its backward": (lambda m: m[:2], "its input gradient was sent"),
    "the backward of the same microbatch": (
        lambda m: (m[0], m[1], m[0]._replace(op="B")),
        "its output gradient is there",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_pair_is_refused(name: str) -> None:
    change, words = MUTANTS[name]
    with pytest.raises(PlanError, match=words) as refused:
        verify(with_members(combined(), change))
    assert "rank 0" in str(refused.value)


def test_a_send_within_and_behind_the_pair_is_refused() -> None:
    plan = combined()
    members = next(at.members for at in plan.programs[0] if at.op == PAIR and len(at.members) == 4)
    with pytest.raises(PlanError, match="it stands twice"):
        verify(with_members(plan, lambda m: m, behind=(members[1],)))


def moved(plan: Plan, rank: int, op: str, to: Callable[[int], int]) -> Plan:
    """The last ``op`` of ``rank`` stands elsewhere: ``to`` is given the position of the pair that comes before it."""
    program = list(plan.programs[rank])
    at = max(i for i, entry in enumerate(program) if entry.op == op)
    before = max(i for i, entry in enumerate(program[:at]) if entry.op == PAIR)
    program.insert(to(before), program.pop(at))
    return replace(plan, programs=tuple(tuple(program) if r == rank else p for r, p in enumerate(plan.programs)))


def test_an_explicit_gradient_sync_before_a_pair_with_the_last_weight_gradient_is_refused() -> None:
    plan = combined(grad_sync=EXPLICIT)
    with pytest.raises(PlanError, match="it comes before the chunk's last gradient"):
        verify(moved(plan, 1, "GRAD_SYNC", lambda pair: pair))


def test_gradient_hooks_opened_for_another_backward_are_refused() -> None:
    with pytest.raises(PlanError, match="the backward that follows is not the one"):
        verify(moved(combined(), 0, "ENABLE_GRAD_SYNC", lambda pair: pair))


def test_sends_within_pairs_hang_where_compute_synchronises_the_device() -> None:
    """Both ranks wait in a pair for the other to post a receive behind its own pair; lowered for it, none is within."""
    plan = combined(lookahead=0)
    verify(plan)
    with pytest.raises(PlanError, match=r"deadlock under device_sync.*, which synchronises the device"):
        verify(plan, device=("device_sync",))
    verify(combined(device=("device_sync",)))

"""Overlapped forward-backward pairs: which operations pair, that nothing stands between them, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_pp.features.pairs.pair_instructions import PAIR, pair, pair_up
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.instruction import (
    COMPUTE_OPS,
    SEND_OPS,
    Instruction,
    each,
    format_program,
    instruction,
    operations,
)
from megatron_pp.plan.ir.instruction_text import parse_instruction, parse_program
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import EXPLICIT, Plan, PlanSpec
from megatron_pp.plan.lower.clock import run_clock
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import edited, placed, refusal, rows


def pairs_in(program: Sequence[Instruction]) -> int:
    return sum(at.op == PAIR for at in program)


def test_forwards_pair_with_whole_backwards_of_other_microbatches() -> None:
    order = parse_program("F0.0 B0.0 F0.1 I1.0 W1.0 F1.2 B0.1 F0.3 F0.4")
    # The same microbatch does not pair, nor does a split backward.
    assert format_program(pair_up(order)) == "F0.0 B0.0 F0.1 I1.0 W1.0 (F1.2 B0.1) F0.3 F0.4"


def test_a_pair_prints_and_parses() -> None:
    for text, made in (
        ("(F0.3 B1.2)", pair(instruction("F", 0, 3), instruction("B", 1, 2))),
        ("(F0.3 SEND_F0.3 B0.2)", pair(*(instruction(op, 0, 2 + (op != "B")) for op in ("F", "SEND_F", "B")))),
    ):
        assert parse_instruction(text) == made
        assert str(made) == text
        assert made.name == f"overlapped pair {text}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipe_v_runs_its_overlapped_phases_as_pairs(size: int, more: int) -> None:
    microbatches = 2 * size + more
    plan = build_plan(PlanSpec("dualpipe_v", size, 2, microbatches, overlap_pairs=True))
    per_rank = [2 * (microbatches - 2 * size + rank + 1) + (size - rank - 1) for rank in range(size)]
    assert [pairs_in(program) for program in plan.programs] == per_rank


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_bubble_of_paired_dualpipe_v_is_the_published_one(size: int) -> None:
    """(P-1)(F&B + B_full - 3W), where a pair takes F + B_full = 3: two units for each rank but one."""
    plan = build_plan(PlanSpec("dualpipe_v", size, 2, 4 * size, overlap_pairs=True))
    assert simulate(plan, StageCosts.uniform(2 * size)).idle == (2.0 * (size - 1),) * size


def test_pairs_are_made_only_if_requested() -> None:
    plan = build_plan(PlanSpec("1f1b", 4, 1, 8))
    assert sum(map(pairs_in, plan.programs)) == 0
    assert sum(pairs_in(pair_up(order)) for order in plan.orders) > 0


def test_a_pair_that_would_wait_in_a_circle_is_taken_apart() -> None:
    """Rank 2 waits for F.1 of rank 1, which would only run it together with B.0, for which it waits for rank 2."""
    placement = Placement("loop", 3, 1)
    orders = [pair_up(placed(placement, rank, "F0.0 F0.1 B0.0 B0.1")) for rank in range(3)]
    assert [pairs_in(order) for order in orders] == [1, 1, 1]
    assert [pairs_in(order) for order in run_clock(orders, placement).orders] == [0, 0, 1]


def test_the_halves_of_a_pair_end_together() -> None:
    placement = Placement("loop", 1, 1)
    order = pair_up(placed(placement, 0, "F0.0 F0.1 B0.0 B0.1"))
    assert run_clock([order], placement).ends == [[1, 3, 4]]


def sends_of(entry: Instruction) -> list[str]:
    return [str(at) for at in entry.members if at.op in SEND_OPS]


@pytest.mark.parametrize(
    ("fields", "within"),
    [
        ({}, True),
        ({"device": ("one_queue",)}, True),
        ({"policy": "batched"}, False),
        ({"policy": "plain"}, False),
        ({"channels": "shared"}, False),
        ({"variable_shapes": True}, False),
        ({"device": ("device_sync",)}, False),
    ],
    ids=str,
)
def test_sends_of_a_pair_are_posted_within_it_if_receives_are_posted_ahead(
    fields: dict[str, Any], within: bool
) -> None:
    """Within it where receives are posted ahead, and nothing in it waits for the device; else after it."""
    plan = build_plan(PlanSpec("combined_1f1b", 4, 2, 8, overlap_pairs=True, **fields))
    for program in plan.programs:
        sent = {str(at) for at in each(program) if at.op in SEND_OPS}
        for entry in program:
            if entry.op == PAIR:
                made = {f"SEND_{half.op}{half.chunk}.{half.mb}" for half in operations(entry)}
                assert set(sends_of(entry)) == (made & sent if within else set())


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_combined_1f1b_pairs_all_but_warm_up_and_flush(size: int, chunks: int) -> None:
    """Megatron's warm-up, and one forward more: no backward needs the forward that stands right before it."""
    microbatches = 4 * size
    spec = PlanSpec("combined_1f1b", size, chunks, microbatches, overlap_pairs=True)
    warmup = [2 * (size - 1 - rank) + (chunks - 1) * size + 1 for rank in range(size)]
    plan = build_plan(spec)
    for rank, program in enumerate(plan.programs):
        entries = [at for at in program if at.op in COMPUTE_OPS]
        ops = [at.op for at in entries]
        assert ops == ["F"] * warmup[rank] + [PAIR] * (chunks * microbatches - warmup[rank]) + ["B"] * warmup[rank]
    idle = simulate(plan, StageCosts.uniform(size * chunks)).idle
    assert idle == (3.0 * (size - 1),) * size, "the bubble of interleaved 1F1B"


def test_the_two_messages_of_a_pair_have_times_of_their_own() -> None:
    """On rank 0 the pair takes 1 + 2 units from 5 on: the output goes out after 0.4 of it, the gradient after 0.9."""
    plan = build_plan(PlanSpec("combined_1f1b", 2, 2, 4, overlap_pairs=True))
    ends = simulate(plan, StageCosts.uniform(4))
    early = simulate(plan, replace(StageCosts.uniform(4), pair_sends=(0.4, 0.9)))
    for result, shares in ((ends, (1.0, 1.0)), (early, (0.4, 0.9))):
        events = {str(event.instruction): event for event in result.events(0)}
        start = events["F0.3"].start
        assert events["B1.0"].end == start + 3
        assert events["SEND_F0.3"].start == pytest.approx(start + 3 * shares[0])
        assert events["SEND_B1.0"].start == pytest.approx(start + 3 * shares[1])
    assert early.makespan <= ends.makespan
    slow = Network(1.0, link=Link(bandwidth=2.0))  # half a unit a message
    hidden = simulate(plan, replace(StageCosts.uniform(4), pair_sends=(0.4, 0.8)), slow)
    assert hidden.makespan < simulate(plan, StageCosts.uniform(4), slow).makespan


def test_a_pair_of_slices_takes_what_its_slices_take() -> None:
    """Whether its sends go out within it or behind it."""
    within, behind = (
        build_plan(PlanSpec("seq_1f1b", 2, 1, 8, slices=2, overlap_pairs=True, policy=policy))
        for policy in ("overlap", "batched")
    )
    costs = StageCosts.uniform(2)
    assert any(map(sends_of, within.programs[0]))
    assert simulate(within, costs).makespan == simulate(behind, costs).makespan
    assert simulate(within, costs).busy == simulate(behind, costs).busy == (24.0, 24.0)


def test_a_send_of_a_pair_that_is_held_back_holds_back_its_rest() -> None:
    """On one hardware queue: rank 1 posts its receive of F.1 late, and rank 0 sends F.2 behind it, in a pair."""
    placement = Placement("loop", 2, 1)
    rank_0 = "F0.0 SEND_F0.0 F0.1 SEND_F0.1 FREE_F0.0 RECV_B0.0 WAIT_B0.0 (F0.2 SEND_F0.2 B0.0) FREE_F0.1 FREE_F0.2"
    rank_0 += " RECV_B0.1 WAIT_B0.1 B0.1 RECV_B0.2 WAIT_B0.2 ENABLE_GRAD_SYNC0 B0.2"
    rank_1 = "RECV_F0.0 WAIT_F0.0 F0.0 B0.0 SEND_B0.0 FREE_B0.0 RECV_F0.1 WAIT_F0.1 F0.1 B0.1 SEND_B0.1 RECV_F0.2"
    rank_1 += " FREE_B0.1 WAIT_F0.2 F0.2 ENABLE_GRAD_SYNC0 B0.2 SEND_B0.2 FREE_B0.2"
    programs = tuple(placement.place(rank, parse_program(line)) for rank, line in enumerate((rank_0, rank_1)))
    spec = PlanSpec("1f1b", 2, 1, 3, overlap_pairs=True)
    plan = Plan(spec, placement, programs)
    verify(plan)
    costs = replace(StageCosts.uniform(2), pair_sends=(0.2, 0.8))
    slow = Network(1.0, link=Link(bandwidth=0.25))  # four units a message
    free, held = simulate(plan, costs, slow), simulate(plan, costs, slow, ["one_queue"])
    pair = [{str(event.instruction): event for event in result.events(0)} for result in (free, held)]
    assert pair[0]["B0.0"].end == pair[0]["F0.2"].start + 3
    assert pair[1]["B0.0"].end > pair[1]["F0.2"].start + 3
    other = pair[1]["SEND_F0.1"]
    assert free.waits[0].queued == 0
    assert held.waits[0].queued == pytest.approx(
        pair[1]["B0.0"].end - pair[1]["F0.2"].start - 3 + other.end - other.start
    )


Members = tuple[Instruction, ...]


def combined(**fields: object) -> Plan:
    return build_plan(PlanSpec("combined_1f1b", 2, 2, 6, overlap_pairs=True, **fields))  # type: ignore[arg-type]


def with_members(plan: Plan, change: Callable[[Members], Members], behind: Members = ()) -> Plan:
    """Rank 0's first pair with two sends has other members; ``behind``: what then follows it."""
    program = plan.programs[0]
    k = next(i for i, at in enumerate(program) if at.op == PAIR and len(at.members) == 4)
    changed = program[k]._replace(members=change(program[k].members))
    return replace(plan, programs=((*program[:k], changed, *behind, *program[k + 1 :]), *plan.programs[1:]))


# The members of a pair F SEND_F B SEND_B, by number; "op=" and "mb+1" change the one before.
WRONG_PAIRS = """
1 0 2 3 | its forward ran
0 1 3 2 | its backward ran
0 2 1 3 | at most its own send behind it
2 3 0 1 | is no pair
0 2 3 | its output was sent
0 1 2 | its input gradient was sent
0 1 1 2 3 | it occurs twice
0 1 mb+1 2 3 | its forward ran
0 1 1 op=FREE_F 2 3 | it occurs twice
2 op=WAIT_B peer=1 0 1 2 3 | already: it occurs twice
0 1 | its input gradient was sent
0 1 0 op=B | its output gradient is there
"""


@pytest.mark.parametrize(("wanted", "words"), rows(WRONG_PAIRS))
def test_a_wrong_pair_is_refused(wanted: str, words: str) -> None:
    def change(members: Members) -> Members:
        found: list[Instruction] = []
        for word in wanted.split():
            field, _, value = word.partition("=")
            if word.isdigit():
                found.append(members[int(word)])
            elif value:
                found[-1] = found[-1]._replace(**{field: int(value) if value.isdigit() else value})
            else:
                found[-1] = found[-1]._replace(mb=found[-1].mb + 1)
        return tuple(found)

    assert re.search(f"rank 0.*{words}", refusal(with_members(combined(), change)))


def test_a_gradient_sync_before_the_last_weight_gradient_of_a_pair_is_refused() -> None:
    sync = instruction("GRAD_SYNC", 1)._replace(stage=2)
    assert "needs the pair's last weight gradient" in refusal(with_members(combined(), lambda m: (*m, sync)))


def test_a_send_within_and_behind_the_pair_is_refused() -> None:
    plan = combined()
    members = next(at.members for at in plan.programs[0] if at.op == PAIR and len(at.members) == 4)
    assert "it occurs twice" in refusal(with_members(plan, lambda m: m, behind=(members[1],)))


def moved(plan: Plan, rank: int, op: str) -> Plan:
    """The last ``op`` of ``rank`` stands in front of the pair that comes before it."""
    program = list(plan.programs[rank])
    at = max(i for i, entry in enumerate(program) if entry.op == op)
    before = max(i for i, entry in enumerate(program[:at]) if entry.op == PAIR)
    program.insert(before, program.pop(at))
    return replace(plan, programs=tuple(tuple(program) if r == rank else p for r, p in enumerate(plan.programs)))


def test_syncs_in_front_of_a_pair_that_has_the_last_gradients_are_refused() -> None:
    explicit = moved(combined(grad_sync=EXPLICIT), 1, "GRAD_SYNC")
    assert "it comes before the chunk's last gradient" in refusal(explicit)
    assert "the backward that follows is not the one" in refusal(moved(combined(), 0, "ENABLE_GRAD_SYNC"))


def test_sends_within_pairs_hang_where_compute_synchronises_the_device() -> None:
    """Both ranks wait in a pair for the other to post a receive behind its own pair; lowered for it, none is within."""
    plan = combined(lookahead=0)
    verify(plan)
    assert re.search("deadlock under device_sync.*, which synchronises the device", refusal(plan, "device_sync"))
    verify(combined(device=("device_sync",)))


def test_a_gradient_sync_may_not_stand_before_a_pair_that_leaves_gradients_incomplete() -> None:
    plan = edited(
        build_plan(PlanSpec("interleaved_1f1b", 2, 2, 2, overlap_pairs=True)), 0, "move ENABLE_GRAD_SYNC1 before F0.0"
    )
    assert "the backward that follows is not the one that completes the chunk's gradients" in refusal(plan)

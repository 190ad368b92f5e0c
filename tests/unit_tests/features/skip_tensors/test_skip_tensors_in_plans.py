"""Named tensors that skip stages: counts, routes, what verify refuses, memory, files."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_pp.errors import FileFormatError, InstructionError, PlanError
from megatron_pp.feature_table import CACHES, NO_CACHE, RECEIVED
from megatron_pp.features.skip_tensors.routes import (
    ALL,
    SkipTensor,
    declared_tensors,
    routes_in,
    routes_of,
    skip_tensors,
    traffic_of,
)
from megatron_pp.plan.builder import build_plan, lowered_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.io.serialize import format_plan, parse_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction, each
from megatron_pp.plan.ir.instruction_text import parse_instruction
from megatron_pp.plan.ir.placement import LOOP, V_SHAPE, Placement
from megatron_pp.plan.ir.spec import ONE_QUEUE, POLICIES, Plan, PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import edited, refusal, rows

# -- counts and routes ---


@pytest.mark.parametrize(("size", "chunks"), [(8, 4), (4, 2), (2, 3), (3, 1)])
def test_counts_of_attention_residuals(size, chunks):
    """arXiv 2603.15031, section 4.1: S(S-1)/2 blocks without a cache, and P(P-1)/2 + (V-1)P^2 with one."""
    stages = size * chunks
    found = {}
    for cache in CACHES:
        spec = PlanSpec("interleaved_1f1b", size, chunks, size, skip_tensors="blocks", skip_cache=cache)
        found[cache] = traffic_of(lowered_plan(spec).programs)
    first, more = size * (size - 1) // 2, (chunks - 1) * size
    assert found[NO_CACHE] == (stages * (stages - 1) // 2, stages - 1)
    assert found[RECEIVED] == (first + more * size, size if chunks > 1 else size - 1)
    assert found[ALL] == (first + more * (size - 1), size - 1)
    if (size, chunks) == (8, 4):
        assert found == {NO_CACHE: (496, 31), RECEIVED: (220, 8), ALL: (196, 7)}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", [LOOP, V_SHAPE])
def test_a_tensor_is_sent_to_a_rank_once(kind, cache):
    """With a cache: each (producer, rank) pair crosses a link once, there and back."""
    schedule = "interleaved_1f1b" if kind == LOOP else "zb_v"
    plan = build_plan(PlanSpec(schedule, 4, 2, 4, skip_tensors="blocks", skip_cache=cache))
    for op in (ins.RECV_F, ins.SEND_B):
        came = Counter(
            (rank, at.tensor)
            for rank, program in enumerate(plan.programs)
            for at in program
            if at.op == op and at.mb == 0
        )
        came = Counter({key: count for key, count in came.items() if key[1]})
        assert max(came.values()) == (2 if cache == NO_CACHE else 1)
        made_here = [(rank, f"block{stage}") for rank in range(4) for stage in plan.placement.stages[rank]]
        assert any(key in came for key in made_here) == (cache != ALL)


def test_hops_that_no_stage_needs_are_left_out():
    placement = Placement(LOOP, 4, 2)
    found = routes_of(skip_tensors("a=0>7; b=2>3; c=1>5", 8), RECEIVED, placement)
    assert [sorted(stage) for stage in found.sent] == [["a"], ["a", "c"], ["a", "b", "c"], ["c"], ["c"], [], [], []]
    assert found.used[7]["a"].stage == 3  # kept on the rank since then
    lean = routes_of(skip_tensors("a=0>7; b=2>3; c=1>5", 8), ALL, placement)
    assert [sorted(stage) for stage in lean.sent] == [["a"], ["a"], ["a", "b"], [], [], [], [], []]
    assert lean.used[5]["c"].is_made_here


def test_stages_declare_what_they_produce_and_use():
    found = declared_tensors([["a", "b"], ["c"], [], []], [[], ["a"], ["b", "c"], ["a"]])
    assert found == skip_tensors("a=0>1,3; b=0>2; c=1>2", 4)
    with pytest.raises(PlanError, match="produced by stages 0 and 1"):
        declared_tensors([["a"], ["a"]], [[], ["a"]])
    with pytest.raises(PlanError, match="stage 1 uses tensor b, which no stage produces"):
        declared_tensors([["a"], []], [[], ["b"]])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "declares no tensor; it would look like"),
        ("a=0>", "declares no tensor"),
        ("a=0>1 nograd", "declares no tensor"),
        ("a=3>4", "there is no stage 4|stage 4 uses it; only stages behind it may, up to 3"),
        ("a=1>1", "stage 1 uses it; only stages behind it may"),
        ("a=7>8", "there is no stage 7"),
        ("a=0>1; a=1>2", "declared 2 times"),
        ("9=0>1", "no name of a tensor"),
    ],
)
def test_impossible_skip_tensor_declarations_are_refused(text, words):
    with pytest.raises(PlanError, match=words):
        PlanSpec("1f1b", 4, 1, 2, skip_tensors=text)


def test_an_unknown_cache_is_refused():
    with pytest.raises(PlanError, match="cache of skip tensors"):
        PlanSpec("1f1b", 4, 1, 2, skip_cache="recieved")


def test_plans_without_named_tensors_do_not_mention_them():
    plan = build_plan(PlanSpec("1f1b", 2, 1, 2))
    assert "skip" not in plan.spec.describe() + format_plan(plan, "json")
    assert "DROP" not in str(plan)


# -- verified ---


REFUSED = """
# DROP
2 | drop DROP0.0:a | tensor a it is not true that it was dropped
2 | twice DROP0.0:a | it was dropped already: it occurs twice
2 | move DROP0.0:a before B0.0 | before the last use of a: of stage 2 .* its backward ran
0 | move DROP0.0:a before FREE_F0.0:a | before the last use of a: .* its output was released
2 | DROP0.0:a with tensor=b | stage 2 does not do this with b
2 | DROP0.0:a with mb=1 | comes before the last use
2 | DROP0.0:a with stage=1 chunk=0 | it has stage 1
# a tensor on its way
1 | drop RECV_F0.0:a | comes before the receive of its input was posted
1 | drop SEND_F0.0:a | comes before its output was sent
1 | move SEND_F0.0:a before F0.0 | comes before its forward ran
2 | move F0.0 before WAIT_F0.0:a | comes before the tensor a is there
0 | SEND_F0.0:a with tensor=z | stage 0 does not do this with z
0 | move SEND_F0.0:a before SEND_F0.0 | messages between them cross
1 | drop FREE_F0.1:a | comes before the last use
# its gradient
1 | drop SEND_B0.0:a | comes before its input gradient was sent
0 | move B0.0 before WAIT_B0.0:a | comes before the gradient a is there
1 | move SEND_B0.0:a before B0.0 | comes before its backward ran
1 | drop FREE_B0.0:a | tensor a it is not true that its input gradient was released
2 | twice SEND_B0.0:a | was sent already: it occurs twice
1 | WAIT_B0.0:a with tensor= | occurs twice
"""


@pytest.mark.parametrize(("rank", "edit", "words"), rows(REFUSED))
def test_verify_refuses_misplaced_instructions_of_named_tensors(rank, edit, words):
    plan = build_plan(PlanSpec("1f1b", 3, 1, 2, skip_tensors="a=0>2"))
    assert re.search(words, refusal(edited(plan, int(rank), edit)))


@pytest.mark.parametrize("op", sorted(ins.SINGLE_OPS))
@pytest.mark.parametrize("name", ["a", "z"])
def test_verify_refuses_an_operation_with_an_unknown_tensor_name(op, name):
    """A program that was written by hand may have one."""
    plan = build_plan(PlanSpec("1f1b", 3, 1, 2, skip_tensors="a=0>2"))
    for rank in range(3):
        (at,) = plan.placement.place(rank, [Instruction(op, mb=0, chunk=0, tensor=name)])
        programs = [*plan.programs]
        programs[rank] = (*programs[rank], at)
        with pytest.raises(PlanError):
            verify(replace(plan, programs=tuple(programs)))


def test_verify_refuses_a_use_of_the_cache_before_the_tensor_has_arrived():
    """The second chunk uses what came to the first one: its forward has no message of that tensor itself."""
    plan = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 2, skip_tensors="a=0>3"))
    assert routes_in(plan).used[3]["a"].stage == 1
    assert "comes before the tensor a is there" in refusal(edited(plan, 1, "move WAIT_F0.0:a behind F1.0"))


def test_a_plan_without_named_tensors_refuses_them():
    plan = build_plan(PlanSpec("1f1b", 2, 1, 2, skip_tensors="a=0>1"))
    with pytest.raises(PlanError, match="the plan has no named tensors"):
        verify(replace(plan, spec=replace(plan.spec, skip_tensors=())))


@pytest.mark.parametrize("shapes_vary", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [3, 4])
def test_two_activations_with_names_may_come_at_one_boundary(size, policy, shapes_vary):
    """Rank 1 of three has no operation between the rounds of F1.2 and F0.3, which both come from rank 0: the receive of
    the second activation is behind the named tensors of the first, as its send is on rank 0."""
    fields = {"policy": policy, "variable_shapes": shapes_vary, "skip_tensors": "blocks"}
    build_plan(PlanSpec("interleaved_1f1b", size, 2, 2 * size, **fields))


@pytest.mark.parametrize("shapes_vary", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2), ("zb_v", 2)])
def test_on_one_hardware_queue_first_receives_are_posted_before_sends(schedule, chunks, policy, shapes_vary):
    """Otherwise the sends of two neighbours stand before the receives for which they wait."""
    fields = {"policy": policy, "variable_shapes": shapes_vary, "skip_tensors": "blocks", "device": (ONE_QUEUE,)}
    plan = build_plan(PlanSpec(schedule, 2, chunks, 4, **fields))
    assert ONE_QUEUE in plan.certificate.rules


# -- memory and time ---


def test_memory_counts_named_tensors():
    plain, named = (build_plan(PlanSpec("1f1b", 3, 1, 4, skip_tensors=text)) for text in ((), "a=0>2"))
    without_them, with_them = verify(plain), verify(named)
    assert [peaks.each.held for peaks in without_them.ranks] == [0, 0, 0]
    # Dropped where they were sent on; kept from forward to backward where they are used.
    assert [peaks.each.held for peaks in with_them.ranks] == [2, 2, 1]
    assert all(peaks.each.held_grads >= 1 for peaks in with_them.ranks)
    late = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, skip_tensors="a=0>3"))
    assert verify(late).ranks[1].each.held == 2  # a group's, since they came to the first chunk


def test_transfers_of_named_tensors_take_time():
    costs, network = StageCosts.uniform(3), Network(link=Link(latency=0.5))
    plain, named = (build_plan(PlanSpec("1f1b", 3, 1, 4, skip_tensors=text)) for text in ((), "a=0>2"))
    one, other = (simulate(plan, costs, network) for plan in (plain, named))
    assert len(other.transfers) == 2 * len(one.transfers)
    assert other.makespan > one.makespan


# -- files ---


def test_a_plan_is_read_as_it_was_written():
    tensors = (SkipTensor("a", 0, (1, 3)), SkipTensor("mask", 1, (2,), False, (3, 2), "int64"))
    plan = build_plan(PlanSpec("1f1b", 4, 1, 3, skip_tensors=tensors, skip_cache=ALL))
    text = format_plan(plan, "json")
    assert parse_plan(text) == plan
    verify(parse_plan(text))
    for wrong in (
        5,
        {"name": "a"},
        {"name": "a", "source": 0, "users": ["1"]},
        {"name": "a", "source": True, "users": []},
    ):
        content = json.loads(text)
        content["spec"]["skip_tensors"] = [wrong]
        with pytest.raises(FileFormatError, match="skip_tensors hold"):
            parse_plan(json.dumps(content))
    with pytest.raises(FileFormatError, match="no named tensors"):
        format_plan(plan, "torch-csv-comms")


def test_a_drop_names_a_tensor():
    assert parse_instruction("DROP0.3:a").name == "release of the tensor of chunk 0, microbatch 3, tensor a"
    with pytest.raises(InstructionError, match=r"takes a tensor \(as in DROP0.3:skip\)"):
        parse_instruction("DROP0.3")


def test_a_drop_in_a_pair_is_refused():
    plan: Plan = build_plan(PlanSpec("dualpipe_v", 2, 2, 6, skip_tensors="a=0>3", overlap_pairs=True))
    assert any(at.op in ins.JOINED_OPS for program in plan.programs for at in program)
    assert not any(m.tensor for p in plan.programs for at in p if at.op in ins.JOINED_OPS for m in each((at,)))
    with pytest.raises(InstructionError, match="is no pair"):
        parse_instruction("(F0.1 DROP0.1:a B0.0)")


def test_the_picture_of_the_hops_is_that_of_the_routes():
    blocks, placement = skip_tensors("blocks", 8), Placement(LOOP, 4, 2)
    routes = [routes_of(blocks, cache, placement) for cache in CACHES]
    lines = ["    hop       " + "  ".join(f"{hop}>{hop + 1}" for hop in range(7))]
    for one in blocks:
        marks = (" .nr*"[1 + sum(one.name in found.sent[hop] for found in routes)] for hop in range(7))
        lines.append(f"    {one.name}     " + "    ".join(marks))
    page = Path(__file__).parents[4] / "docs" / "skip_tensors.md"
    assert "\n".join(lines) in page.read_text()

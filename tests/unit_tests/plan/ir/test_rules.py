"""The table of rules: it is whole, and a program that violates a rule is refused with that rule's facts in words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import megatron_pp
from megatron_pp.errors import PlanError
from megatron_pp.feature_table import FEATURE_OPS, FEATURES, ROW_OF
from megatron_pp.features.fsdp.fsdp_instructions import GRADIENTS, USED
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.feature import rows_of
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.rules import rule_of, words_of
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.verify.verifier import verify

# Between them they have every op: transfers, a hand-off at the turn of the V, whole and split backwards, a tensor that
# skips a stage, copies to the host and back; the passes of a split output layer with their collectives; and those of
# sharded stages.
V_PLAN = build_plan(PlanSpec("dualpipe_v", 2, 2, 6, skip_tensors="x=0>2", offload_chunks=2))
SPLIT_OUTPUT = build_plan(PlanSpec("vocab_1f1b_alg1", 3, 1, 6))
SHARDED = build_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, fsdp_collectives="per_step"))
RULES = {op: rule for op in ins.SINGLE_OPS if (rule := rule_of(op)) is not None}


def plan_with(op: str) -> Plan:
    return SPLIT_OUTPUT if op in ins.RANKWIDE_OPS else SHARDED if op in ins.STAGE_OPS else V_PLAN


def site_of(op: str) -> tuple[Plan, int, int]:
    """A plan, a rank and a place in its program where ``op`` stands, in the middle of the pipeline and of the step."""
    plan = plan_with(op)
    return next(
        (plan, rank, i)
        for rank, program in enumerate(plan.programs)
        for i, at in enumerate(program)
        if at.op == op and (at.mb > 0 or op in ins.STAGE_OPS) and 0 < at.stage < plan.placement.num_stages - 1
    )


def changed(plan: Plan, rank: int, *program: Instruction) -> Plan:
    return replace(plan, programs=(*plan.programs[:rank], program, *plan.programs[rank + 1 :]), orders=())


def refusal(plan: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        verify(plan)
    return str(caught.value)


def test_every_op_has_a_rule_and_every_fact_words() -> None:
    assert set(RULES) == ins.SINGLE_OPS - ins.SYNC_OPS
    facts = 0
    for rule in RULES.values():
        facts |= rule.needs | rule.adds
    assert len(list(words_of(facts))) == facts.bit_count()  # every fact has words


def test_a_feature_has_rows_for_the_ops_that_are_registered_and_facts_of_its_own() -> None:
    taken = 0
    for row in FEATURES:
        if not row.ops:
            continue
        rows = rows_of(row.rows)
        assert set(rows.names) == set(row.ops)
        assert set(rows.rules) == set(row.ops) - ins.JOINED_OPS  # rules are of each of the joined operations
        assert set(row.ops).issuperset([*rows.changes, *rows.in_order, *rows.ends_use])
        assert not taken & sum(rows.facts)
        taken |= sum(rows.facts)
    core = [rule for op, rule in RULES.items() if op not in FEATURE_OPS]
    assert not any(taken & (rule.needs | rule.adds | rule.bars) for rule in core)


def test_the_core_names_instructions_of_features_where_they_are_registered_alone() -> None:
    package = Path(megatron_pp.__file__).parent
    texts = {path.relative_to(package): path.read_text() for path in package.rglob("*.py")}
    for op, row in ROW_OF.items():
        folder = Path("features", row.folder)
        outside = [path for path in texts if folder not in path.parents]
        naming = [str(path) for path in outside if len(op) > 1 and re.search(rf"\b{op}\b", texts[path])]
        assert naming in (["feature_table.py"], []), op


def test_every_fact_that_a_rule_needs_is_added_by_another_rule() -> None:
    added = GRADIENTS | USED  # by compute (``ShardWalk``)
    for rule in RULES.values():
        added |= rule.adds
    assert all(rule.needs & ~added == 0 for rule in RULES.values())


@pytest.mark.parametrize("op", sorted(RULES))
def test_verify_refuses_a_repeated_instruction(op: str) -> None:
    plan, rank, i = site_of(op)
    program = plan.programs[rank]
    words = refusal(changed(plan, rank, *program[: i + 1], *program[i:]))
    assert words.startswith(f"rank {rank}: {program[i]} ({program[i].name}): ")
    assert words.endswith("already: it occurs twice")
    assert next(words_of(RULES[op].adds)) in words


@pytest.mark.parametrize("op", sorted(op for op, rule in RULES.items() if rule.needs))
def test_verify_refuses_an_instruction_before_its_input(op: str) -> None:
    plan, rank, i = site_of(op)
    program = plan.programs[rank]
    words = refusal(changed(plan, rank, program[i], *program[:i], *program[i + 1 :]))
    assert words.startswith(f"rank {rank}: {program[i]} ({program[i].name}): it comes before ")
    assert any(fact in words for fact in words_of(RULES[op].needs))


@pytest.mark.parametrize("op", sorted(ins.HAND_OPS))
def test_a_hand_off_before_the_neighbour_stage_has_produced_is_refused(op: str) -> None:
    plan, rank, i = site_of(op)
    program = plan.programs[rank]
    words = refusal(changed(plan, rank, program[i], *program[:i], *program[i + 1 :]))
    assert "has not produced it yet on this rank" in words


@pytest.mark.parametrize("op", sorted(RULES))
def test_verify_refuses_a_missing_instruction(op: str) -> None:
    """Where it stood, by what needs it, or at the end."""
    plan, rank, i = site_of(op)
    program = plan.programs[rank]
    words = refusal(changed(plan, rank, *program[:i], *program[i + 1 :]))
    facts = [*words_of(RULES[op].adds), "the next forward of", "has not produced it yet", "no ENABLE_GRAD_SYNC"]
    assert any(fact in words for fact in facts), words


@pytest.mark.parametrize("op", sorted({*RULES, *ins.SYNC_OPS}))
@pytest.mark.parametrize("field", ["stage", "peer"])
def test_a_wrong_stage_or_peer_is_refused(op: str, field: str) -> None:
    plan = (
        build_plan(PlanSpec("dualpipe_v", 2, 2, 6, grad_sync="explicit", param_sync=True))
        if op in SYNCS
        else plan_with(op)
    )
    rank, i = next((r, i) for r, p in enumerate(plan.programs) for i, at in enumerate(p) if at.op == op)
    program = plan.programs[rank]
    wrong = program[i]._replace(**{field: getattr(program[i], field) + 1})
    programs = (*plan.programs[:rank], (*program[:i], wrong, *program[i + 1 :]), *plan.programs[rank + 1 :])
    words = refusal(replace(plan, programs=programs, orders=()))
    assert words.startswith(f"rank {rank}: {wrong} ({wrong.name}): it has stage {wrong.stage} and peer {wrong.peer}; ")


SYNCS = (ins.GRAD_SYNC, ins.PARAM_SYNC)

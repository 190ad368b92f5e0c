"""Schedule files with wrong operations: every command and a training step refuse them in words, before anything is
built on their order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.io.schedule_file import family_of_file
from megatron_pp.plan.io.serialize import FORMATS, format_plan, parse_plan
from megatron_pp.plan.ir.instruction import TRANSFER_OPS, Instruction
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.testing.pipeline import run_in_threads
from megatron_pp.testing.toy import ToyData
from megatron_pp.tools.cli.command_line import main
from testkit.inputs.mutation import mutated_json, mutated_text
from testkit.inputs.plan_text import placed
from testkit.sweeps import EXHAUSTIVE

PLANS = [build_plan(PlanSpec(*size)) for size in (("1f1b", 2, 1, 4), ("zb_v", 2, 2, 4), ("zb_h1", 1, 1, 2))]
COMMANDS = (
    ("verify", "-s"),
    ("simulate", "-s"),
    ("draw", "--style", "grid", "-s"),
    ("verify", "--import"),
    ("draw", "--style", "grid", "--import"),
    ("plan", "--format", "torch-csv", "--import"),
)


def exit_code(command: tuple[str, ...], path: Path, plan: Plan) -> int:
    spec = plan.spec
    size = ["-P", spec.pipeline_size, "-V", spec.num_chunks, "-M", spec.num_microbatches]
    family_of_file.cache_clear()
    return main([*command, str(path), *map(str, size if command[-1] == "-s" else [])])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@settings(
    max_examples=200 if EXHAUSTIVE else 40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_every_command_ends_with_an_answer(form: str, data: st.DataObject, tmp_path: Path) -> None:
    plan = data.draw(st.sampled_from(PLANS))
    path = tmp_path / ("plan.json" if form == "json" else "plan.csv")
    text = format_plan(plan, form)
    faults = [mutated_text(text), *([mutated_json(json.loads(text))] if form == "json" else [])]
    path.write_text(data.draw(st.one_of(faults)), encoding="utf-8", errors="surrogatepass")
    assert exit_code(data.draw(st.sampled_from(COMMANDS)), path, plan) in (0, 1, 2)


def with_orders(*orders: str) -> str:
    """A file of 1F1B whose compute order is another one."""
    plan = build_plan(PlanSpec("1f1b", 2, 1, 2))
    return format_plan(replace(plan, orders=ordered(plan, *orders)), "json")


def ordered(plan: Plan, *orders: str) -> tuple[tuple[Instruction, ...], ...]:
    """With some stage and peer where the placement has none, as a file of another program would have."""

    def complete(at: Instruction) -> Instruction:
        return at._replace(stage=max(at.stage, 0), peer=max(at.peer, 0) if at.op in TRANSFER_OPS else at.peer)

    return tuple(tuple(map(complete, placed(plan.placement, rank, order))) for rank, order in enumerate(orders))


GOOD = "F0.0 F0.1 B0.0 B0.1"
WRONG = {
    "F0.0 F0.1 B0.0 B0.9": r"rank 1: B0\.9 \(backward of .*\): chunks are 0\.\.0, microbatches 0\.\.1",
    "F0.0 F0.1 B0.0 B7.1": r"rank 1: B7\.1 .* chunks are 0\.\.0",
    "F0.0 F0.1 F0.1 B0.0 B0.1": r"rank 1: F0\.1 .* it occurs twice",
    "F0.0 F0.1 B0.1": r"rank 1: B0\.0 .* the order lacks it",
    "F0.0 F0.1": r"rank 1: B0\.0 .* the order lacks it",
    "": r"rank 1: F0\.0 .* the order lacks it",
    "F0.0 B0.1 F0.1 B0.0": r"rank 1: B0\.1 .* F0\.1 has to come before it",
    "F0.0 F0.1 W0.0 B0.0 B0.1": r"rank 1: W0\.0 .* I0\.0 has to come before it",
    "F0.0 F0.1 B0.0 B0.1 SEND_F0.0": r"rank 1: SEND_F0\.0 .* an order holds compute alone",
}


@pytest.mark.parametrize("order", WRONG)
def test_an_order_is_checked_before_it_is_lowered(order: str, tmp_path: Path) -> None:
    """By training and by the commands that lower it; those that read the whole plan see that it runs another order."""
    path = tmp_path / "wrong.json"
    path.write_text(with_orders(GOOD, order))
    with pytest.raises(PlanError, match=f"{path}: {WRONG[order]}"):
        run_in_threads(2, 1, ToyData(2), pipeline_schedule=str(path), batch_p2p_comm=True)
    with pytest.raises(PlanError, match=WRONG[order]):
        verify(parse_plan(path.read_text()))
    with pytest.raises(PlanError, match=WRONG[order]):
        format_plan(parse_plan(path.read_text()), "torch-csv")


def test_a_plan_that_does_not_run_its_order_is_refused() -> None:
    plan = parse_plan(with_orders("F0.0 B0.0 F0.1 B0.1", "F0.0 B0.0 F0.1 B0.1"))
    with pytest.raises(PlanError, match=r"rank 0: the plan's order has B0\.0 where its program runs F0\.1"):
        verify(plan)
    split = replace(plan, orders=ordered(plan, "F0.0 B0.0 F0.1 B0.1", "F0.0 I0.0 F0.1 B0.1 W0.0"))
    with pytest.raises(PlanError, match="rank 0: the plan's order"):
        verify(split)


def test_a_file_with_forwards_only_is_accepted_for_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.csv"
    path.write_text("0F0,0F1\n1F0,1F1\n")
    spec = PlanSpec(str(path), 2, 1, 2, digest=family_of_file(str(path)).digest)
    assert build_plan(replace(spec, forward_only=True)).spec.forward_only
    with pytest.raises(PlanError, match=r"rank 0: B0\.0 .* the order lacks it"):
        build_plan(spec)

"""Plans with the collectives of sharded stages: where presets and costs place them, what ``verify`` refuses, what they
cost in time and memory, how they are written and drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from megatron_pp.config.settings import StepSettings
from megatron_pp.errors import PlanError, ScheduleInputError
from megatron_pp.feature_table import BY_COST, FSDP_COLLECTIVES, PER_RUN, PER_STEP
from megatron_pp.features.fsdp.fsdp_instructions import REDUCE_GRAD, RESHARD, UNSHARD, WAIT_REDUCE_GRAD, WAIT_UNSHARD
from megatron_pp.features.fsdp.fsdp_runner import check_fsdp
from megatron_pp.features.fsdp.replicas import check_replicas
from megatron_pp.features.fsdp.shard_memory import whole_stages
from megatron_pp.plan.builder import build_plan, verified_plan
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.io.serialize import TORCH_CSV_COMMS, format_plan, parse_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import format_program
from megatron_pp.plan.ir.instruction_text import parse_program
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.memory import ModelShape, rank_memory
from megatron_pp.plan.simulate.simulation import Simulation
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.tools.draw.chrome import render_chrome_trace
from megatron_pp.tools.draw.facts import GATHERING, REDUCING, legend_entries
from megatron_pp.tools.draw.figures import as_svg, figure
from megatron_pp.tools.draw.html import render_html
from megatron_pp.tools.draw.text import render_text
from megatron_pp.tools.draw.timeline import simulated_timeline
from testkit.inputs import plan_text
from testkit.inputs.drawn_specs import drawn_spec
from testkit.inputs.plan_text import edited, rows

GATHER = 1.0  # of a stage, as long as its forward


def sharded(schedule: str, p: int, v: int, m: int, kind: str = PER_STEP, most: int = 0, **more: object) -> PlanSpec:
    return replace(PlanSpec(schedule, p, v, m, fsdp_collectives=kind, fsdp_max_active_stages=most), **more)


def simulated(spec: PlanSpec, gather: float = GATHER) -> Simulation:
    plan = build_plan(spec)
    stages = plan.placement.num_stages
    return simulate(
        plan, replace(StageCosts.uniform(stages), unshard=(gather,) * stages, reduce_grad=(gather,) * stages)
    )


def count(plan: Plan, op: str) -> int:
    return sum(at.op == op for program in plan.programs for at in program)


def of_shards(plan: Plan, rank: int = 0) -> str:
    """``rank``'s compute and collectives of replicas."""
    shown = ins.STAGE_OPS | ins.COMPUTE_OPS
    return format_program(at for at in plan.programs[rank] if at.op in shown)


# -- placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "program"),
    [
        (
            "per_step",
            "UNSHARD0 WAIT_UNSHARD0 F0.0 UNSHARD1 F0.1 WAIT_UNSHARD1 F1.0 F1.1 B1.0 B1.1 REDUCE_GRAD1 RESHARD1 B0.0 "
            "B0.1 REDUCE_GRAD0 RESHARD0 WAIT_REDUCE_GRAD0 WAIT_REDUCE_GRAD1",
        ),
        (
            "per_run",
            "UNSHARD0 WAIT_UNSHARD0 F0.0 UNSHARD1 F0.1 RESHARD0 WAIT_UNSHARD1 F1.0 F1.1 B1.0 UNSHARD0 B1.1 "
            "REDUCE_GRAD1 RESHARD1 WAIT_UNSHARD0 B0.0 B0.1 REDUCE_GRAD0 RESHARD0 WAIT_REDUCE_GRAD0 WAIT_REDUCE_GRAD1",
        ),
    ],
)
def test_presets_place_fsdp_collectives(kind: str, program: str) -> None:
    assert of_shards(build_plan(sharded("interleaved_1f1b", 2, 2, 2, kind))) == program


def test_zero_3_gathers_for_each_operation_and_reduces_behind_each_backward() -> None:
    assert of_shards(build_plan(sharded("1f1b", 2, 1, 2, "zero3")), 1) == (
        "UNSHARD0 WAIT_UNSHARD0 F0.0 RESHARD0 UNSHARD0 WAIT_UNSHARD0 B0.0 REDUCE_GRAD0 RESHARD0 UNSHARD0 "
        "WAIT_UNSHARD0 F0.1 RESHARD0 UNSHARD0 WAIT_UNSHARD0 B0.1 WAIT_REDUCE_GRAD0 REDUCE_GRAD0 RESHARD0 "
        "WAIT_REDUCE_GRAD0"
    )


def test_an_evaluation_reduces_nothing() -> None:
    plan = build_plan(sharded("interleaved_1f1b", 2, 2, 4, "zero3", forward_only=True))
    assert count(plan, UNSHARD) == count(plan, RESHARD) == 16
    assert not count(plan, REDUCE_GRAD)


def drawn(seed: int) -> Iterator[PlanSpec]:
    """A spec of every schedule."""
    for name, family in SCHEDULES.items():
        if not family.barriers and family.search is None:
            rng = random.Random(f"{name} {seed}")
            kind = rng.choice(FSDP_COLLECTIVES)
            spec = drawn_spec(name, rng, measured=None)
            least = 2 if spec.overlap_pairs else 1
            most = rng.choice((0, least, least + 1)) if kind not in ("per_step", "zero2") else 0
            yield replace(spec, fsdp_collectives=kind, fsdp_max_active_stages=most)


@pytest.mark.parametrize("seed", range(3))
def test_every_schedule_with_fsdp_collectives_is_accepted_under_all_device_rules(seed: int) -> None:
    for spec in drawn(seed):
        plan, verdict = verified_plan(spec)
        most = spec.fsdp_max_active_stages or spec.num_chunks
        assert all(0 < one.each.unsharded <= most for one in verdict.ranks), spec
        assert count(plan, UNSHARD) == count(plan, WAIT_UNSHARD) == count(plan, RESHARD)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"fsdp_collectives": "zero_3"}, "'zero_3' is not known (did you mean zero3?)"),
        ({"fsdp_max_active_stages": 2}, "fsdp_max_active_stages is 2 without fsdp_collectives"),
        ({"fsdp_collectives": "per_step", "fsdp_max_active_stages": 1}, "keeps all 2 stages of a rank whole"),
        ({"fsdp_collectives": "zero2", "fsdp_max_active_stages": 1}, "keeps all 2 stages of a rank whole"),
        ({"fsdp_collectives": "by_cost", "fsdp_max_active_stages": -1}, "fsdp_max_active_stages is -1"),
        ({"fsdp_collectives": "by_cost", "fsdp_max_active_stages": 1, "overlap_pairs": True}, "halves of a pair"),
    ],
)
def test_impossible_fsdp_settings_are_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(PlanError) as caught:
        PlanSpec("interleaved_1f1b", 2, 2, 4, **fields)
    assert why in str(caught.value)


def test_megatron_fsdp_is_refused_with_the_reason() -> None:
    """Modules of Megatron-FSDP are recognised by this method."""
    chunk = torch.nn.Linear(2, 2)
    chunk._replace_param_with_raw_if_needed = lambda: None
    inputs = SimpleNamespace(chunks=[chunk])
    fields = asdict(sharded("1f1b", 2, 1, 2))
    with pytest.raises(ScheduleInputError, match=r"chunk 0 \(Linear\) is sharded by Megatron-FSDP, which gathers"):
        check_fsdp(fields, inputs, StepSettings.from_config(SimpleNamespace()))


def test_a_split_output_layer_is_refused() -> None:
    with pytest.raises(PlanError, match="splits the output layer"):
        build_plan(sharded("vocab_1f1b", 2, 1, 4))


# -- by cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "p", "v", "m"), [("interleaved_1f1b", 4, 4, 16), ("zb_v", 4, 2, 16)])
def test_by_cost_is_no_slower_than_a_preset_of_the_same_limit_and_unshards_less(
    schedule: str, p: int, v: int, m: int
) -> None:
    presets = {kind: simulated(sharded(schedule, p, v, m, kind)) for kind in (PER_STEP, PER_RUN, "zero3")}
    for most, preset in ((0, PER_STEP), (2, PER_RUN), (v, PER_RUN)):
        placed, other = simulated(sharded(schedule, p, v, m, BY_COST, most)), presets[preset]
        assert placed.makespan <= other.makespan
        assert count(placed.plan, UNSHARD) <= count(other.plan, UNSHARD)
    assert presets["zero3"].makespan > 1.3 * presets[PER_STEP].makespan, (
        "one chunk's next unshard waits for its reshard"
    )


def test_with_memory_for_three_of_four_stages_by_cost_needs_a_seventh_of_the_unshards() -> None:
    placed = simulated(sharded("interleaved_1f1b", 4, 4, 16, BY_COST, 3))
    per_run = simulated(sharded("interleaved_1f1b", 4, 4, 16, PER_RUN, 3))
    assert placed.makespan == per_run.makespan == simulated(sharded("interleaved_1f1b", 4, 4, 16)).makespan
    assert 7 * count(placed.plan, UNSHARD) < count(per_run.plan, UNSHARD)


def test_a_gather_is_posted_as_late_as_its_time_allows() -> None:
    """On rank 0 of two, chunk 1 begins at the fifth slot or later."""
    for gather, before in ((0.5, "F0.1"), (2.0, "F0.0")):
        measured = Measured(unshard=gather, reduce_grad=gather)
        plan = build_plan(sharded("interleaved_1f1b", 2, 2, 4, BY_COST, measured=measured))
        program = of_shards(plan).split()
        compute = [at for at in program if at[0] in "FB"]
        follows = next(at for at in program[program.index("UNSHARD1") :] if at in compute)
        assert follows == before


# -- what verify refuses ----------------------------------------------------------------------------------------------

PLAN = build_plan(sharded("interleaved_1f1b", 2, 3, 4, PER_RUN, 2))
ONCE = build_plan(sharded("interleaved_1f1b", 2, 2, 2))
REFUSED = """
drop UNSHARD1 | WAIT_UNSHARD1 (wait for the unshard of chunk 1): it comes before its unshard was posted
twice UNSHARD1 | its unshard was posted already: it occurs twice
move UNSHARD1 behind F1.0 | WAIT_UNSHARD1
add UNSHARD1 before FREE_B1.1 | an unshard of the stage is under way
UNSHARD1 with chunk=0 stage=0 | UNSHARD0 (unshard of chunk 0): its unshard was posted already
UNSHARD1 with stage=3 | it has stage 3
drop WAIT_UNSHARD1 | F1.0 (forward of chunk 1, microbatch 0): it comes before its parameters are whole
twice WAIT_UNSHARD1 | its parameters are whole already: it occurs twice
move WAIT_UNSHARD1 behind F1.0 | F1.0 (forward of chunk 1, microbatch 0): it comes before its parameters are whole
move WAIT_UNSHARD1 before UNSHARD1 | it comes before its unshard was posted
WAIT_UNSHARD1 with chunk=0 stage=0 | its parameters are whole already
drop RESHARD0 | at the end of the plan, of chunk 0 (stage 0) it is not true that its parameters were resharded
twice RESHARD0 | its parameters were resharded already: it occurs twice
move RESHARD0 before B0.1 | B0.1 (backward of chunk 0, microbatch 1): it comes before its parameters are whole
move RESHARD0 before F0.0 | it comes before an operation used its parameters
move RESHARD0 before WAIT_UNSHARD0 | it comes before its parameters are whole
RESHARD0 with chunk=1 stage=2 | RESHARD1
drop REDUCE_GRAD0 | WAIT_REDUCE_GRAD0 (wait for the gradient reduction of chunk 0): it comes before the reduction
twice REDUCE_GRAD0 | the reduction of its gradients was posted already: it occurs twice
move REDUCE_GRAD0 before B0.1 | it comes before the stage's last gradient: 1 are still to come
move REDUCE_GRAD0 before B0.0 | it comes before it has gradients to reduce
REDUCE_GRAD0 with chunk=1 stage=2 | REDUCE_GRAD1
drop WAIT_REDUCE_GRAD0 | of chunk 0 (stage 0) it is not true that the reduction of its gradients is over
twice WAIT_REDUCE_GRAD0 | the reduction of its gradients is over already: it occurs twice
move WAIT_REDUCE_GRAD0 before REDUCE_GRAD0 | it comes before the reduction of its gradients was posted
move WAIT_REDUCE_GRAD0 before B0.0 | it comes before the reduction of its gradients was posted
WAIT_REDUCE_GRAD0 with chunk=1 stage=2 | WAIT_REDUCE_GRAD1
"""


@pytest.mark.parametrize(("edit", "words"), rows(REFUSED))
def test_collectives_out_of_place_are_refused(edit: str, words: str) -> None:
    found = plan_text.refusal(edited(ONCE, 0, edit))
    assert found.startswith("rank 0: ")
    assert words in found


@pytest.mark.parametrize("op", sorted(ins.STAGE_OPS))
@pytest.mark.parametrize("kind", ["per_run", "zero3", "by_cost"])
def test_no_collective_can_be_left_out_or_doubled(op: str, kind: str) -> None:
    plan = build_plan(sharded("interleaved_1f1b", 2, 3, 4, kind, 2))
    tried = 0
    for rank, program in enumerate(plan.programs):
        for i in (i for i, at in enumerate(program) if at.op == op):
            for changed in ((*program[:i], *program[i + 1 :]), (*program[: i + 1], *program[i:])):
                plan_text.refusal(replace(plan, programs=(*plan.programs[:rank], changed, *plan.programs[rank + 1 :])))
                tried += 1
    assert tried >= 12


def test_a_wait_for_a_reduction_amid_an_unshard_is_refused() -> None:
    """FSDP2 would drop the gathered parameters there."""
    plan = build_plan(sharded("1f1b", 2, 1, 3, "zero3"))
    program = list(plan.programs[1])
    wait = next(i for i, at in enumerate(program) if at.op == WAIT_REDUCE_GRAD)
    taken = program.pop(wait)
    unshard = max(i for i in range(wait) if program[i].op == UNSHARD)
    program.insert(unshard + 1, taken)
    assert "an unshard of the stage is under way" in plan_text.refusal(
        replace(plan, programs=(plan.programs[0], tuple(program)))
    )


def test_more_stages_than_the_limit_are_refused() -> None:
    within = replace(PLAN, spec=replace(PLAN.spec, fsdp_max_active_stages=1))
    assert "2 stages of this rank are whole then, and at most 1 may be" in plan_text.refusal(within)


def test_fsdp_collectives_are_refused_in_a_plan_whose_spec_has_none() -> None:
    spec = replace(ONCE.spec, fsdp_collectives="")
    assert "the plan's spec has no fsdp_collectives" in plan_text.refusal(replace(ONCE, spec=spec))


# -- replicas ---------------------------------------------------------------------------------------------------------


def test_replicas_that_post_in_another_order_are_refused() -> None:
    other = edited(edited(PLAN, 0, "drop UNSHARD1"), 0, "add UNSHARD1 before UNSHARD0")
    with pytest.raises(PlanError) as caught:
        check_replicas([PLAN, other])
    assert str(caught.value).startswith("rank 0: collective 0 of its replicas is UNSHARD0 and UNSHARD1: replicas post")


def test_replicas_that_deadlock_together_are_refused_although_each_is_valid_alone() -> None:
    """Rank 0 of the first waits for an unshard before it sends, rank 0 of the second posts that unshard only behind a
    message from its rank 1; whose own unshard waits for rank 1 of the first, which waits for the message of its rank 0.
    """
    first = edited(ONCE, 0, "move UNSHARD1 behind F0.0")
    first = edited(first, 0, "move WAIT_UNSHARD1 behind UNSHARD1")
    first = edited(edited(first, 1, "move UNSHARD0 behind WAIT_F0.0"), 1, "move WAIT_UNSHARD0 behind UNSHARD0")
    second = edited(ONCE, 0, "move UNSHARD1 behind WAIT_F1.0")
    second = edited(second, 1, "move WAIT_UNSHARD0 behind UNSHARD0")
    for plan in (first, second):
        verify(plan)
        for rules in ((), ("one_queue",)):
            check_replicas([plan, plan], rules)
    with pytest.raises(PlanError, match=r"of 2 replicas.*deadlock under rendezvous: rank \d waits at WAIT_UNSHARD"):
        check_replicas([first, second])
    with pytest.raises(PlanError, match="deadlock under one_queue"):
        check_replicas([first, second], ["one_queue"])


def test_replicas_of_other_sizes_are_refused() -> None:
    with pytest.raises(PlanError, match="the replicas' pipelines have 2, 3 ranks"):
        check_replicas([ONCE, build_plan(sharded("interleaved_1f1b", 3, 2, 3))])


# -- time, memory, files, drawings ------------------------------------------------------------------------------------


def test_collectives_of_a_rank_run_one_after_another_on_a_link_of_their_own() -> None:
    result = simulated(sharded("interleaved_1f1b", 2, 3, 4, "zero3"), gather=0.7)
    for made, waits in zip(result.copies, result.waits, strict=True):
        assert {at.instruction.op for at in made} == {UNSHARD, REDUCE_GRAD}
        assert all(event.end - event.start == pytest.approx(0.7) for event in made)
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(made))
        assert waits.transfer > 0
    assert not any(t.kind in ins.STAGE_OPS for t in result.transfers)
    free = simulated(sharded("interleaved_1f1b", 2, 3, 4, "zero3"), gather=0.0)
    assert free.makespan == simulate(build_plan(PlanSpec("interleaved_1f1b", 2, 3, 4)), StageCosts.uniform(6)).makespan


def test_one_hardware_queue_holds_back_what_follows_a_collective_behind_another() -> None:
    spec = sharded("interleaved_1f1b", 2, 2, 8, PER_RUN)
    costs = replace(StageCosts.uniform(4), unshard=(1.5,) * 4, reduce_grad=(1.5,) * 4)
    plan = build_plan(spec)
    assert simulate(plan, costs, device=["one_queue"]).makespan >= simulate(plan, costs).makespan


def test_memory_counts_whole_parameters_and_gradients_in_bytes() -> None:
    shape = ModelShape(num_layers=6, hidden_size=64, seq_length=32, data_parallel=4)
    stage = shape.parameters([1], 6)
    for kind, most in ((PER_STEP, 3), (PER_RUN, 2)):
        plan = build_plan(sharded("interleaved_1f1b", 2, 3, 4, kind, most if kind == PER_RUN else 0))
        plain = build_plan(PlanSpec("interleaved_1f1b", 2, 3, 4))
        memory, parts = rank_memory(plan, 0, shape), whole_stages(plan, 0)
        assert memory.static == 3 * stage * (2 + 4 + 12) / 4
        assert max(map(len, parts[0])) == most
        assert max(map(len, parts[1])) == 3
        whole = [2 * stage * len(p) + 4 * stage * len(g) for p, g in zip(*parts, strict=True)]
        others = [a - b for a, b in zip(memory.after, whole, strict=True)]
        assert max(others) == pytest.approx(max(rank_memory(plain, 0, shape).after))
        assert memory.parts.whole in whole


@pytest.mark.parametrize("kind", FSDP_COLLECTIVES)
def test_plans_are_written_and_read_back(kind: str) -> None:
    plan = build_plan(sharded("zb_v", 2, 2, 4, kind, 2))
    read = parse_plan(format_plan(plan, "json"))
    assert (read.spec, list(read.programs)) == (plan.spec, list(plan.programs))
    verify(read)
    for rank, program in enumerate(plan.programs):
        assert plan.placement.place(rank, parse_program(format_program(program))) == program
    actions = parse_plan(format_plan(plan, TORCH_CSV_COMMS))
    assert not any(at.op in ins.STAGE_OPS for program in actions.programs for at in program)


def test_a_plan_file_with_fsdp_collectives_runs_unchanged(tmp_path) -> None:
    plan = build_plan(sharded("1f1b", 2, 1, 4, PER_RUN))
    changed = edited(plan, 0, "move REDUCE_GRAD0 behind RESHARD0")
    path = tmp_path / "plan.json"
    plan_text.save_plan(changed, path)
    spec = replace(plan.spec, schedule=str(path))
    assert list(build_plan(spec).programs) == list(changed.programs)


def test_fsdp_collectives_are_drawn() -> None:
    result = simulated(sharded("interleaved_1f1b", 2, 2, 4, PER_RUN))
    timeline = simulated_timeline(result)
    assert timeline.title.endswith("fsdp=per_run")
    lines = "\n".join(line.plain for line in render_text([timeline], 100))
    assert "u r m unshards, gradient reductions, both" in lines
    assert any(set(line.strip()) <= set("urm ") and {"u", "r"} <= set(line) for line in lines.splitlines())
    events = json.loads(render_chrome_trace(timeline))["traceEvents"]
    names = [one["args"]["name"] for one in events if one["name"] == "thread_name"]
    assert {"unshards", "gradient reductions"} <= set(names)
    assert "copies back" not in names
    assert any(one["name"] == UNSHARD + "1" for one in events)
    assert '"hasCollectives":true' in render_html([timeline], "them").replace(": true", ":true")
    assert {GATHERING, REDUCING} <= {entry.kind for entry in legend_entries([timeline])}
    assert as_svg(lambda: figure([timeline]), "them").count("all-gather (FSDP)") == 1


def test_the_waits_of_a_plan_are_those_that_its_posts_need() -> None:
    for kind in FSDP_COLLECTIVES:
        plan = build_plan(sharded("interleaved_1f1b", 2, 2, 8, kind))
        assert count(plan, REDUCE_GRAD) == count(plan, WAIT_REDUCE_GRAD) == (32 if kind.startswith("zero") else 4)
        assert count(plan, UNSHARD) == count(plan, WAIT_UNSHARD)

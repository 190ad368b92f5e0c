"""The search: its results, and that its numbers are those of the plan that it recommends."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.activations import kept_timeline
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.simulate.steady import steady_step
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.planner.bound import lower_bound
from megatron_pp.tools.advise import pipeline_search as search_module
from megatron_pp.tools.advise.answer import (
    alternatives,
    as_json,
    in_one_line,
    layout_of,
    megatron_flags,
    our_flags,
    sentences,
    throughput,
    why_not,
)
from megatron_pp.tools.advise.candidates import candidates, estimate
from megatron_pp.tools.advise.evaluate import evaluate
from megatron_pp.tools.advise.microbatch_order import best_order
from megatron_pp.tools.advise.model import DECODER, EMBEDDING, LOSS, PART, Layer, Model, layer
from megatron_pp.tools.advise.pipeline_search import Findings, search
from megatron_pp.tools.advise.question import Question
from testkit.sweeps import drawn

FLUID = Model((layer(PART, 4.0, 4.0, 4.0, 8.0),))
NAMED = ("1f1b", "zb_h1", "zb_h2", "zb_v", "v_min", "interleaved_1f1b", "interleaved_zb")


def question(**options):
    values = {"pipeline_size": 4, "global_batch": 8, "memory": 80.0, "models": ((1, FLUID),), "max_chunks": 2}
    return Question(**{**values, "latency": 0.1, "schedules": NAMED, **options})


@pytest.fixture(scope="module")
def found():
    return search(question())


def test_the_recommended_step_is_that_of_its_plan(found):
    best = found.best
    plan = build_plan(best.spec)
    verify(plan)
    assert simulate(plan, best.fit.costs, Network(link=Link(0.1))).makespan == best.step
    assert best.certificate["digest"] == plan.certificate.digest
    assert best.step == min(one.step for one in found.outcomes if not one.refused)
    assert best.bound.step <= best.step
    assert not found.not_looked_at


def test_estimated_steps_are_within_2_percent_of_simulated_steps(found):
    steps = {one.candidate: one.step for one in found.outcomes}
    for one in found.estimates:
        assert one.step == pytest.approx(steps[one.candidate], rel=0.02)


def test_the_front_falls_in_memory_as_it_rises_in_time(found):
    front = found.front
    assert len(front) >= 3
    assert all(a.step < b.step and a.peak > b.peak for a, b in pairwise(front))
    assert {one.candidate.schedule for one in alternatives(found)} | {found.best.candidate.schedule} == set(NAMED)
    assert all("slower" in why_not(one, found.best) for one in found.fitting if one.step > 1.01 * found.best.step)


def test_no_answer_needs_more_memory_than_there_is():
    whole = search(question(recompute=False))
    tight = search(question(recompute=False, memory=6.0))
    assert max(tight.best.fit.peaks) <= 6.0 < max(whole.best.fit.peaks)
    assert tight.best.step > whole.best.step
    assert all(one.peak > 6.0 for one in tight.outcomes if one.refused.startswith("needs"))


def test_recomputation_where_nothing_else_fits():
    tight = question(memory=3.2)
    assert search(replace(tight, recompute=False)).best is None
    best = search(tight).best
    assert any(best.fit.recomputed)
    assert best.again > 0
    assert max(best.fit.peaks) <= 3.2


def test_megatron_recomputes_as_many_layers_on_all_stages_as_on_one():
    model = Model((Layer(EMBEDDING, 0, 0, 0), *[layer(DECODER, 1, 1, 1, 1.0, static=0.5)] * 16, Layer(LOSS, 0, 0, 0)))
    asked = question(models=((1, model),), schedules=("1f1b",), max_chunks=1, memory=12.0)
    best = search(asked).best
    assert len(set(best.fit.recomputed)) > 1
    most = max(best.fit.recomputed)
    even = StageCosts.per_stage([4] * 4, [4 + most] * 4, [4] * 4)
    step = simulate(build_plan(best.spec), even, Network(link=Link(0.1))).makespan
    assert step > best.step
    assert f"for all stages, {most}: with it the step takes {step:.4g} ms" in "".join(sentences(asked, best))
    assert megatron_flags(asked, best)[-2:] == ["--recompute-num-layers", str(most)]
    assert best.flagged == step
    other = replace(best, step=best.step * 1.01, flagged=best.step * 1.01)
    found = Findings(asked, (best, other), (), (), (), 0.0)
    assert (found.fitting[0], found.best) == (best, other)
    assert why_not(best, other).startswith("-1.0%, but +")
    fluid = replace(asked, models=((1, Model((layer(PART, 16, 16, 16, 16.0),))),))
    assert "the flags below have no recomputation" in "".join(sentences(fluid, search(fluid).best))


def test_a_search_for_these_costs_is_at_least_as_good():
    named = search(question(pipeline_size=2, global_batch=4, schedules=("1f1b", "zb_h1"))).best
    model = Model((layer(PART, 4.0, 4.0, 4.0, 8.0, static=4.0),))
    asked = question(pipeline_size=2, global_batch=4, schedules=("auto",), max_chunks=1, memory=12.0)
    asked = replace(asked, models=((1, model),))
    outcome = next(evaluate(asked, one) for one in candidates(asked) if one.schedule == "auto")
    assert outcome.step <= named.step
    assert outcome.spec.measured.memory_limit == (10.0, 10.0)  # 1.5 P microbatches need 12, and static memory 2
    assert our_flags(outcome, "m.json")[:4] == ["--pipeline-schedule", "auto", "--pipeline-measured", "m.json"]


def test_offloading_makes_room_in_host_memory():
    asked = question(memory=4.5, recompute=False, schedules=("1f1b", "interleaved_1f1b", "pipe_offload"))
    assert not any(one.offload_chunks or one.schedule == "pipe_offload" for one in candidates(asked))
    assert search(asked).best is None
    asked = replace(asked, host_bandwidth=4.0)
    best = search(asked).best
    assert best.candidate.offload_chunks > 0
    assert max(best.fit.peaks) <= 4.5
    assert best.on_host > 0
    host = f"{best.on_host:.3g} GB of host memory, at most {2 * best.on_host:.3g} pinned"
    assert host in "\n".join(sentences(asked, best))
    assert best.fit.costs.offload == tuple(kept / 4.0 for kept in best.fit.activation)
    plan = build_plan(best.spec)
    assert simulate(plan, best.fit.costs, Network(link=Link(0.1))).makespan == best.step
    for rank, stages in enumerate(plan.placement.stages):
        kept = max(kept_timeline(plan.programs[rank], stages, best.fit.activation, best.fit.late))
        assert best.fit.peaks[rank] == pytest.approx(kept)
    assert f"{best.candidate.offload_chunks} of {best.candidate.num_chunks} chunks offloaded" in in_one_line(
        asked, best
    )
    assert "--offload-chunks" in our_flags(best)


def test_slow_copies_are_not_worth_it():
    """If the memory suffices, nothing is offloaded."""
    asked = question(host_bandwidth=0.5, schedules=("1f1b", "interleaved_1f1b"))
    found = search(asked)
    assert found.best.candidate.offload_chunks == 0
    slow = [one for one in found.fitting if one.candidate.offload_chunks and one.candidate.schedule == "1f1b"]
    assert all(one.step > found.best.step for one in slow)


def test_plans_are_for_the_device():
    rules = ("one_queue", "device_sync")
    best = search(question(device=rules, schedules=("interleaved_1f1b", "zb_v"))).best
    assert best.certificate["device"] == list(rules)
    assert best.spec.device == rules


def test_layers_go_where_they_cost_least_and_come_out_as_megatrons_text():
    model = Model((Layer(EMBEDDING, 0, 0, 0), *[layer(DECODER, 1, 1, 1, 0.1)] * 14, Layer(LOSS, 2, 2, 2)))
    asked = question(models=((1, model),), schedules=("1f1b", "zb_h1"), max_chunks=1)
    best = search(asked).best
    assert layout_of(best) == "Et*4|(t*4|)*2t*2L"
    assert "Et*4|(t*4|)*2t*2L" in megatron_flags(asked, best)
    assert "layers 4,4,4,2" in in_one_line(asked, best)
    even = evaluate(replace(asked, models=((1, Model((layer(PART, 16, 16, 16),))),)), best.candidate)
    assert best.step <= even.step * (1 + 1e-9)


def test_microbatches_of_several_sizes():
    """If costs are proportional to the size, smaller microbatches leave a smaller bubble."""
    asked = question(
        global_batch=16, models=((1, FLUID), (2, FLUID.times(2)), (3, FLUID.times(3))), schedules=("1f1b",)
    )
    assert sorted(asked.microbatches()) == [(1, 16), (2, 8)]
    assert search(asked).best.candidate.micro_batch == 1
    slow = replace(asked, models=((1, FLUID.times(2)), (2, FLUID.times(2))))  # twice as many take no longer
    assert search(slow).best.candidate.micro_batch == 2


def test_a_budget_that_is_spent_says_what_is_left():
    found = search(question(), budget=0.0)
    assert found.best is not None
    assert found.not_looked_at
    assert as_json(found)["not_looked_at"]


def test_the_fastest_by_their_estimates_are_built_first_whatever_the_number_of_processes():
    """The begun searches and the needless ones are also the same."""
    asked = question(pipeline_size=2, global_batch=6, schedules=(), max_chunks=2, memory=20.0)
    alone, together = (search(asked, jobs=jobs) for jobs in (1, 2))
    assert not alone.cut_short
    assert {one.candidate: one.step for one in alone.outcomes} == {one.candidate: one.step for one in together.outcomes}
    assert (alone.best, {*alone.needless}) == (together.best, {*together.needless})
    named = [one.candidate for one in alone.outcomes if not (one.candidate.searches or one.candidate.family.barriers)]
    steps = {one.candidate: (one.peak > asked.memory, one.step) for one in alone.estimates}
    first = [steps[one] for one in named if one in steps and one.policy == "overlap"]
    assert first == sorted(first)


@pytest.mark.parametrize(("memory", "recomputes"), [*drawn([(3.5, True), (5.0, True)], 1), (6.0, False)])
def test_a_search_recomputes_where_fewer_microbatches_in_flight_cost_more(memory, recomputes):
    """A rank's share of a microbatch is 2 GB. Without recomputation, only one microbatch at a time fits into 3.5 GB."""
    asked = question(global_batch=16, schedules=("auto", "1f1b"), max_chunks=1, memory=memory)
    found = {one.schedule: evaluate(asked, one) for one in candidates(asked)}
    assert any(found["auto"].fit.recomputed) == recomputes
    assert found["auto"].step <= 1.001 * found["1f1b"].step


def test_more_work_than_is_done_unasked_is_left(monkeypatch):
    asked = question(pipeline_size=2, global_batch=6, schedules=("1f1b", "zb_h1", "auto"), max_chunks=1, memory=20.0)
    monkeypatch.setattr(search_module, "_SEARCHES", 10)
    found = search(asked)
    assert ([one.schedule for one in found.not_looked_at], found.cut_short) == (["auto"], True)
    monkeypatch.setattr(search_module, "_PLANS", 20)
    assert {one.candidate.schedule for one in search(asked).outcomes} == {"zb_h1"}
    assert {one.schedule for one in search(asked).not_looked_at} == {"1f1b", "auto"}
    monkeypatch.setattr(search_module, "_ESTIMATES", 0)
    nothing = search(asked)
    assert (nothing.best, nothing.outcomes, len(nothing.not_looked_at)) == (None, (), 3)


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    "sizes", drawn([{"global_batch": 99999}, {"max_chunks": 1000}, {"slices": (100000,)}], 2), ids=str
)
def test_a_budget_is_kept_whatever_the_sizes(monkeypatch, sizes, jobs):
    monkeypatch.setattr(search_module, "_FIRST", 0.5)
    monkeypatch.setattr(search_module, "_FIRST_LOOK", 0.2)
    began = time.monotonic()
    found = search(question(pipeline_size=8, schedules=(), **{"global_batch": 64, **sizes}), budget=0.5, jobs=jobs)
    assert time.monotonic() - began < 10
    assert found.cut_short
    assert not found.interrupted


def test_a_budget_that_is_too_short_for_one_plan_builds_one():
    asked = question(schedules=("1f1b",), max_chunks=1)
    assert search(asked, budget=0.0, jobs=2).best is not None


@pytest.mark.slow
def test_a_budget_is_kept_where_an_interrupt_is_lost(monkeypatch):
    """An interrupt is lost in a callback of the garbage collector, which only prints it."""
    monkeypatch.setattr(search_module, "_AGAIN", 0.1)
    lost = []

    def report(done, of, what):
        while not lost:
            try:
                time.sleep(5.0)
            except KeyboardInterrupt:
                lost.append(what)

    began = time.monotonic()
    found = search(question(pipeline_size=8, global_batch=9999), budget=0.0, report=report)
    assert (len(lost), found.interrupted) == (1, False)
    assert time.monotonic() - began < 10


def test_processes_that_cannot_start_are_an_error_and_not_waited_for(tmp_path):
    """A script without a guard starts itself in each process, and there Python refuses to start more processes."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {[str(Path(__file__).parent)]}\n"
        "from test_pipeline_search import question, search\nsearch(question(), budget=50.0, jobs=2)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "PlanError: a process of the search ended" in ended.stderr


def test_an_interrupted_search_has_the_best_so_far():
    built = []

    def report(done, of, what):
        built.extend([] if what.startswith("estimating") else [what])
        if len(built) == 2:
            raise KeyboardInterrupt

    found = search(question(), report=report)
    assert (found.interrupted, len(found.fitting)) == (True, 2)
    assert found.best in found.fitting
    known = {one.candidate for one in found.outcomes}
    assert {*found.not_looked_at} == {one.candidate for one in found.estimates} - known
    assert as_json(found)["interrupted"]


def test_a_split_output_layer_is_weighed_but_not_recommended_unasked():
    loss = Layer(LOSS, 4, 4, 4, 2.0, static=8.0)
    model = Model((*[layer(DECODER, 1, 1, 1, 1.0)] * 8, loss))
    asked = question(models=((1, model),), schedules=(), max_chunks=1, splits_backward=False)
    assert {"vocab_1f1b", "vocab_1f1b_alg1"} <= set(asked.tried)
    assert not any(name.startswith("vocab") for name in question(schedules=()).tried)
    (plain,) = (evaluate(asked, one) for one in candidates(asked) if one.schedule == "1f1b")
    (split,) = (evaluate(asked, one) for one in candidates(asked) if one.schedule == "vocab_1f1b")
    assert why_not(split, plain).startswith(f"{split.step / plain.step - 1:+.1%}, but the model must split")
    found = search(replace(asked, schedules=("1f1b", "vocab_1f1b")))
    best = found.best
    assert (best.candidate.schedule, best.refused, best.step) == ("vocab_1f1b", "", split.step)
    assert best.step < plain.step
    assert best.fit.costs.output_layer == (4.0, 4.0, 4.0)
    assert simulate(build_plan(best.spec), best.fit.costs, Network(link=Link(0.1))).makespan == best.step
    assert best.bound.step <= best.step
    # P + 1 microbatches of 2 layers, and of the output layer a quarter of its parameters and of some logits
    assert best.fit.peaks[0] == pytest.approx(5 * 2.0 + 8.0 / 4 + 1 * 2.0 / 4)


def test_throughput_follows_from_tokens_and_the_step_time():
    model = replace(FLUID, flops=1e12)
    asked = question(models=((1, model),), schedules=("1f1b",), seq_length=1000, peak_flops=1e15, data_parallel=2)
    best = search(asked).best
    rates = throughput(asked, best)
    assert rates["tokens_per_second"] == pytest.approx(8 * 1000 / best.step * 1e3)
    assert rates["mfu"] == pytest.approx(4 * 1e12 / 4 / (best.step / 1e3) / 1e15)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_size": 0}, "pipeline_size is 0"),
        ({"pipeline_size": 2001}, "pipeline_size is 2001; at most 2000 ranks"),
        ({"memory": 0.0}, "must be above 0"),
        ({"global_batch": 7, "models": ((2, FLUID),)}, "the nearest possible global batch is 6"),
        ({"schedules": ("zbv",)}, "did you mean zb_v"),
        ({"device": ("queue",)}, "device rule 'queue' is not known"),
    ],
)
def test_advise_refuses_impossible_questions(options, words):
    with pytest.raises(PlanError) as error:
        question(**options)
    assert words in str(error.value)


def test_an_estimate_says_why_there_is_none():
    asked = question(models=((1, Model((layer(DECODER, 1, 1, 1),) * 5)),), schedules=("zb_v",))
    (one,) = (estimate(asked, candidate) for candidate in candidates(asked))
    assert "cannot fill 8 stages" in one.refused


COSTS = (2.0, 0.25, 1.75, 0.5, 0.5, 1.0)


def test_an_operation_takes_its_microbatchs_time():
    plan = build_plan(PlanSpec("1f1b", 2, 1, 3))
    costs = StageCosts.uniform(2)
    result = simulate(plan, replace(costs, microbatches=(1.0, 2.0, 4.0)))
    took = {(e.instruction.op, e.instruction.mb): e.end - e.start for e in result.events(0) if e.end > e.start}
    assert [took["F", mb] for mb in range(3)] == [1.0, 2.0, 4.0]
    assert [took["B", mb] for mb in range(3)] == [2.0, 4.0, 8.0]
    assert result.busy == (21.0, 21.0)
    assert simulate(plan, replace(costs, microbatches=(1.0,) * 3)).makespan == simulate(plan, costs).makespan
    pairs = build_plan(PlanSpec("1f1b", 2, 1, 3, overlap_pairs=True))
    assert simulate(pairs, replace(costs, microbatches=(1.0, 2.0, 4.0))).busy == (21.0, 21.0)


def test_steps_in_a_row_have_them_again_in_each():
    plan = build_plan(PlanSpec("zb_h2", 2, 1, 4))
    found = steady_step(plan, replace(StageCosts.uniform(2), microbatches=(1.0, 2.0, 1.0, 2.0)))
    assert found.busy == pytest.approx((18.0, 18.0))


@pytest.mark.parametrize(
    ("costs", "words"),
    [((1.0, 2.0), "for 2 microbatches; the plan has 3"), ((1.0, 0.0, 1.0), "microbatch 1 costs 0.0")],
)
def test_wrong_microbatch_costs_are_refused(costs, words):
    with pytest.raises(PlanError) as error:
        simulate(build_plan(PlanSpec("1f1b", 2, 1, 3)), replace(StageCosts.uniform(2), microbatches=costs))
    assert words in str(error.value)


def test_the_lower_bound_refuses_unequal_microbatches():
    plan = build_plan(PlanSpec("1f1b", 2, 1, 3))
    with pytest.raises(PlanError, match=r"leave StageCosts\.microbatches out"):
        lower_bound(plan.placement, 3, replace(StageCosts.uniform(2), microbatches=(1.0, 2.0, 3.0)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_order_is_nearly_the_best_of_all(schedule):
    model = Model((layer(PART, 2.0, 2.0, 2.0, 1.0),))
    asked = Question(2, 6, 80.0, ((1, model),), schedules=(schedule,), policies=("overlap",), microbatch_costs=COSTS)
    best = search(asked).best
    found = best_order(asked, best, 5.0)
    plan = build_plan(best.spec)
    steps = {
        order: simulate(plan, replace(best.fit.costs, microbatches=order)).makespan
        for order in set(itertools.permutations(COSTS))
    }
    assert found.step == steps[tuple(COSTS[k] for k in found.order)]
    assert found.step_as_given == steps[COSTS]
    assert min(steps.values()) <= found.step <= 1.01 * min(steps.values())
    assert found.step < 0.95 * found.step_as_given


def test_without_costs_there_is_no_order():
    model = Model((layer(PART, 2.0, 2.0, 2.0, 1.0),))
    asked = Question(2, 4, 80.0, ((1, model),), schedules=("1f1b",))
    assert best_order(asked, search(asked).best, 1.0) is None
    with pytest.raises(PlanError, match="costs of 3 microbatches are given, but a step has 4"):
        replace(asked, microbatch_costs=(1.0, 1.0, 1.0))

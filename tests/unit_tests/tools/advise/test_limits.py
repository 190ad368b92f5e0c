"""The rounding of sums does not decide ties, and limits of work hold for every size."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.tools.advise import pipeline_search as search_module
from megatron_pp.tools.advise.answer import sentences, why_not
from megatron_pp.tools.advise.candidates import candidates
from megatron_pp.tools.advise.model import PART, Model, layer
from megatron_pp.tools.advise.pipeline_search import search
from megatron_pp.tools.advise.question import Question

MODEL = Model((layer(PART, 2.0, 1.0, 1.0, 2.0),))
NOISE = 1e-15


def question(*sizes, **options):
    return Question(*(sizes or (2, 8)), 800.0, ((1, MODEL),), policies=("overlap",), **options)


@pytest.fixture(scope="module")
def best():
    return search(question(schedules=("1f1b",))).best


def test_one_rank_has_one_chunk():
    """Megatron: "pipeline-model-parallel size should be greater than 1 with interleaved schedule"."""
    found = search(question(1, 8))
    assert {one.num_chunks for one in candidates(found.question)} == {1}
    assert (found.best.candidate.schedule, found.best in found.front) == ("1f1b", True)
    assert all("as fast" in why_not(one, found.best) for one in found.fitting if one.step < 1.001 * found.best.step)
    with pytest.raises(PlanError, match=r"zb_v has 2 chunks a rank, but Megatron needs two ranks or more"):
        search(question(1, 8, schedules=("zb_v",)))


def test_the_rounding_of_sums_recommends_no_more_chunks_and_no_order_of_arrival(best):
    other = replace(best.candidate, schedule="interleaved_1f1b", num_chunks=3)
    faster = replace(best, candidate=other, step=best.step * (1 - NOISE), flagged=best.flagged * (1 - NOISE))
    eager = replace(best, candidate=replace(best.candidate, schedule="eager_1f1b"))
    found = search(question(schedules=("1f1b",)))
    for outcomes in itertools.permutations((best, faster, eager)):
        listed = replace(found, outcomes=outcomes)
        assert [one.candidate.schedule for one in listed.fitting] == ["1f1b", "eager_1f1b", "interleaved_1f1b"]
        assert (listed.best, listed.front) == (best, [best])
    assert why_not(best, faster).startswith("as fast, ")


def test_equally_fast_answers_recompute_no_more():
    model = Model((layer(PART, 1.4, 1.0, 0.8, 2.0),))
    asked = replace(question(), models=((1, model),), schedules=("gpipe", "1f1b"), max_chunks=1)
    found = search(asked)
    others = [why_not(one, found.best) for one in found.fitting if one is not found.best]
    assert [re.sub(r"[\d.]+", "N", why) for why in others] == ["as fast, N GB against N"]


@pytest.mark.parametrize("noise", [NOISE, -NOISE])
def test_a_step_at_its_bound_is_printed_as_its_bound(best, noise):
    step, bound = 9.2875 * (1 - noise), replace(best.bound, step=9.2875 * (1 + noise))
    assert f"{step:.4g}" != f"{bound.step:.4g}"
    line = sentences(question(), replace(best, step=step, bound=bound))[0]
    assert len(set(re.findall(r"9\.28\d", line))) == 1


def test_a_plan_that_is_too_large_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(search_module, "_PLANS", 20)
    asked = question(schedules=("1f1b", "zb_v", "auto"), max_chunks=2)  # of 16 and 32 forwards
    found = search(asked)
    assert {one.candidate.num_chunks for one in (*found.estimates, *found.outcomes)} == {1}
    assert {one.num_chunks for one in found.not_looked_at} == {2}
    assert {one.candidate.num_chunks for one in search(asked, budget=60.0).outcomes} == {1, 2}


@pytest.mark.parametrize("sizes", [(2, 10**7), (2000, 10**4)], ids=str)
def test_nothing_is_built_where_every_plan_is_too_large(monkeypatch, sizes):
    monkeypatch.setattr(search_module, "estimate", lambda *_: pytest.fail("an order is built"))
    found = search(question(*sizes))
    assert (found.estimates, found.outcomes, found.best) == ((), (), None)
    assert {*found.not_looked_at} == {*candidates(question(*sizes))}


def test_the_work_of_an_estimate_is_that_of_all_it_looks_at(monkeypatch):
    """The bound has all microbatches, and so have the orders of schedules that keep all microbatches."""
    asked = question(2, 1000, schedules=("1f1b", "gpipe"), max_chunks=1)
    one_chunk = {one.schedule: one.work_of_estimate(2) for one in candidates(asked)}
    assert (one_chunk["1f1b"], one_chunk["gpipe"]) == (16 + 2000, 16 + 4000)
    monkeypatch.setattr(search_module, "_ESTIMATES", 2016 + 4015)
    assert [one.candidate.schedule for one in search(asked).estimates] == ["1f1b"]
    wide = {one.num_chunks: one for one in candidates(question(1000, 4)) if one.schedule == "interleaved_zb"}
    assert wide[2].work(1000) > 100 * wide[2].forwards(1000)  # P passes over P ranks


def test_variants_of_the_best_are_counted(monkeypatch):
    asked = replace(question(schedules=("1f1b",)), policies=("overlap", "batched"))
    assert {one.candidate.policy for one in search(asked).outcomes} == {"overlap", "batched"}
    monkeypatch.setattr(search_module, "_VARIANTS", 1)
    assert {one.candidate.policy for one in search(asked).outcomes} == {"overlap"}

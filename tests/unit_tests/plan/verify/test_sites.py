"""Rules by site: a program that they accept, the walk accepts, with the same peaks of memory, faults or not."""

import random
import time
from itertools import accumulate

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.ir.repeated import Block
from megatron_pp.plan.ir.spec import Plan, PlanSpec
from megatron_pp.plan.verify import lifetime
from megatron_pp.plan.verify.lifetime import RankPeaks, check_rank
from megatron_pp.plan.verify.sites import peak, positions_of, sites_of
from tests.harness.plan_mutants import mutants, steady_block
from tests.harness.sweeps import EXHAUSTIVE

SPECS = [
    PlanSpec("interleaved_1f1b", 3, 2, 9),
    PlanSpec("interleaved_1f1b", 2, 2, 8, param_sync=True, channels="shared"),
    PlanSpec("interleaved_zb", 2, 2, 8),
    PlanSpec("interleaved_1f1b", 2, 2, 8, forward_only=True),
    PlanSpec("zb_v", 2, 2, 8, device=("static_buffers",)),
    PlanSpec("interleaved_1f1b", 2, 2, 8, policy="batched"),
    PlanSpec("combined_1f1b", 2, 2, 8, overlap_pairs=True),
]


def checked(plan: Plan, rank: int, block: Block | None) -> RankPeaks | str:
    try:
        return check_rank(plan, rank, block=block)
    except PlanError as error:
        return str(error)


@pytest.mark.parametrize("spec", SPECS, ids=PlanSpec.describe)
def test_sites_decide_as_the_walk_does(spec: PlanSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, rng, accepted = lowered_plan(spec), random.Random(5), 0
    period = spec.pipeline_size if spec.schedule.startswith(("interleaved", "combined")) else 1
    faults = list(mutants(plan, rng, 2))
    for what, mutant in [("none", plan), *(faults if EXHAUSTIVE else rng.sample(faults, 40))]:
        rank = 0 if what == "none" else int(what.split("rank ")[1].split(",")[0])
        for moved in (0, 1):
            try:
                block = steady_block(mutant, period)
            except IndexError:  # an operation is missing
                continue
            block = block._replace(ends=tuple(end + moved for end in block.ends))
            by_site = checked(mutant, rank, block)
            with monkeypatch.context() as patch:
                patch.setattr(lifetime, "_by_site", lambda *_: None)
                assert by_site == checked(mutant, rank, block), (what, moved)
            accepted += isinstance(by_site, RankPeaks)
    assert accepted


@pytest.mark.parametrize("spec", [PlanSpec("1f1b", 2, 1, 1), PlanSpec("gpipe", 1, 1, 3)], ids=PlanSpec.describe)
def test_without_a_block_and_with_whole_sites_missing(spec: PlanSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for what, mutant in mutants(lowered_plan(spec)):
        for rank in range(spec.pipeline_size):
            by_site = checked(mutant, rank, None)
            with monkeypatch.context() as patch:
                patch.setattr(lifetime, "_by_site", lambda *_: None)
                assert by_site == checked(mutant, rank, None), what


def test_plans_need_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_walked", lambda *_: pytest.fail("walked"))
    for spec in SPECS:
        for rank in range(spec.pipeline_size):
            check_rank(lowered_plan(spec), rank)
    with pytest.raises(pytest.fail.Exception):
        check_rank(lowered_plan(PlanSpec("seq_1f1b", 2, 1, 4, slices=2)), 0)


def test_time_is_linear_in_the_chunks_of_a_rank() -> None:
    def seconds(chunks: int) -> float:
        plan, taken = lowered_plan(PlanSpec("interleaved_1f1b", 1, chunks, 1)), []
        for _ in range(3):
            start = time.thread_time()
            check_rank(plan, 0)
            taken.append(time.thread_time() - start)
        return min(taken)

    assert seconds(3200) < 9 * seconds(800)  # 4.3 times; quadratic, 15 times


def test_sites_are_the_program() -> None:
    program = lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 6)).programs[1]
    sites = sites_of(program)
    assert positions_of({at.op for at in program}, sites) == list(range(len(program)))
    for site in sites:
        at = [site.at._replace(mb=mb) for mb in site.microbatches]
        assert at == [program[k] for k in site.positions]
        assert site.before(site.positions[-1]) == sorted(site.microbatches[:-1])
        assert [program[k].mb for k in site.in_order()] == sorted(site.microbatches)


def test_the_peak_is_that_of_the_running_sum() -> None:
    rng = random.Random(3)
    for length in range(60):
        changes = [rng.choice((-1, 1, 1, 0)) for _ in range(length)]
        places = {sign: [k for k, change in enumerate(changes) if change == sign] for sign in (-1, 1)}
        assert peak((places[sign], sign) for sign in places) == max([0, *accumulate(changes)])
    assert peak([([0, 3], 2), ([1], -2), ([2], 0)]) == 2

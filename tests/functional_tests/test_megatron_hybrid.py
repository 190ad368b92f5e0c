"""Megatron-core's HybridModel, which release 0.18 has first, with its stages in a V: what each chunk holds, and parity
with Megatron's own interleaved schedule.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from megatron_pp.plan.ir.placement import Placement
from tests.functional_tests.megatron_support import assert_equal, needs_megatron
from tests.functional_tests.test_megatron_v_placement import CHECKS, loop_of, name_of

from testkit.megatron.cases import Case, Job, Model, Outcome, compared  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip


def has_hybrid_model() -> bool:
    """Return whether this release has one. Look for the folder, since `find_spec` imports the packages."""
    core = importlib.util.find_spec("megatron")
    return core is not None and any(
        Path(folder, "core", "models", "hybrid").is_dir() for folder in core.submodule_search_locations or ()
    )


pytestmark = [
    needs_megatron,
    pytest.mark.slow,
    pytest.mark.skipif(not has_hybrid_model(), reason="HybridModel comes with megatron-core 0.18"),
]

PLAIN = Model(layers=8, hybrid="*-|*|-*-|*-")
V = Case(PLAIN, pp=2, vp=2, schedule="zb_v", policy="overlap", optimizer="adam", clip_grad=0.0, steps=2).short()
FURTHER = Model(layers=8, hybrid=PLAIN.hybrid + "/*-", extra_config=(("mtp_num_layers", 1),))
TRAINED = [
    V,
    dataclasses.replace(V, schedule="dualpipe_v", policy="batched"),
    dataclasses.replace(V, schedule="1f1b_v", model=dataclasses.replace(PLAIN, tied=True)),
    dataclasses.replace(V, policy="plain", model=FURTHER),
]
TWICE = dataclasses.replace(V, pp=4, microbatches=8, model=Model(layers=8, hybrid="*|-|*|-|*|-|*|-"))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    folder = tmp_path_factory.mktemp("references")
    jobs = compared([*TRAINED, TWICE], loop_of, f"{folder}/loop{{n}}-{{rank}}.pt", other_cut=True)
    return {job.case: outcome for job, outcome in zip(jobs, run_jobs(jobs, deadline=400), strict=True)}


@pytest.mark.parametrize("case", [*TRAINED, TWICE], ids=name_of)
def test_training_equals_megatrons_interleaved_schedule(case: Case, outcomes: dict[Case, Outcome]) -> None:
    assert_equal(outcomes[case])
    assert outcomes[case].param_difference == 0.0


def test_a_stage_holds_what_megatron_gives_it_in_a_loop() -> None:
    (found,) = run_jobs([Job(V, check=CHECKS + "contents_of_loop_and_v")], deadline=120)
    assert found.status == "ok", found.message
    loop, v = Placement("loop", V.pp, 2), Placement("v", V.pp, 2)
    places = [(rank, chunk) for rank in range(V.pp) for chunk in (0, 1)]
    stages = {loop.stage(*place): found.facts[place[0]][0][place[1]] for place in places}
    assert [stages[number]["layers"] for number in range(4)] == [[1, 2], [3], [4, 5, 6], [7, 8]]
    for rank, chunk in places:
        assert found.facts[rank][1][chunk] == {**stages[v.stage(rank, chunk)]}


def test_a_pattern_for_another_number_of_stages_is_megatrons_error() -> None:
    case = dataclasses.replace(V, model=dataclasses.replace(PLAIN, hybrid="*-*--*-*"))
    (found,) = run_jobs([Job(case)], deadline=120)
    assert found.status == "error"
    assert "no pipe" in found.message

"""Training steps of Megatron-core under this engine and under its own schedule give equal parameters and hook calls.

They include Megatron's data-parallel wrapper, its optimizers and its finalisation, with evaluation between steps.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re

import pytest

from megatron_pp.integrations.megatron.releases.versions import release_of
from tests.functional_tests.megatron_support import assert_equal, needs_megatron

from testkit.megatron import groups  # isort: skip
from testkit.megatron.cases import Case, Job, Model, Outcome  # isort: skip
from testkit.megatron.runner import run_jobs  # isort: skip

pytestmark = needs_megatron

CASES = {
    **{name: case.short() for name, case in groups.DATA_AND_TENSOR.items()},
    **{
        name: cases[name].short()
        for cases, name in (
            (groups.EXPERTS, "4 experts, evaluation between steps"),
            (groups.EXPERTS, "EP 2, chunks"),
            (groups.PREDICTION, "2 further tokens, chunks, per-token loss"),
            (groups.PREDICTION, "on a stage of its own, chunks"),
            (groups.LAYOUTS, "Ett||ttt|tL, a stage without layers"),
            (groups.CONTEXT, "CP 2, chunks, per-token loss"),
            (groups.LOOPS, "`adjust_tensor_shapes_fn`: a student and its teacher"),
            (groups.LOOPS, "rerun state machine"),
            (groups.LOOPS, "some microbatches recompute, chunks"),
            (groups.LOOPS, "evaluation with `autograd.grad`, chunks"),
        )
    },
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    jobs = groups.compared_with_megatron(list(CASES.values()), str(tmp_path_factory.mktemp("megatron")))
    return {job.case: outcome for job, outcome in zip(jobs, run_jobs(jobs, deadline=300), strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_megatrons_schedule(name: str, outcomes: dict[Case, Outcome]) -> None:
    case = CASES[name]
    outcome, theirs = outcomes[case], outcomes[groups.reference_case(case)]
    if theirs.status != "ok" and release_of(importlib.metadata.version("megatron-core")) < (0, 16):
        pytest.skip(f"Megatron's own schedule in this release: {theirs.message}")
    assert_equal(outcome)
    assert len(outcome.losses) == case.steps * case.microbatches
    if case.optimizer is not None:
        assert outcome.param_difference == 0.0, "parameters must have been compared"


def traced(pp: int, vp: int | None, aligned: bool) -> Case:
    return Case(
        Model(layers=max(4, pp * (vp or 1))),
        pp=pp,
        vp=vp,
        microbatches=4,
        policy="batched",
        optimizer="distributed",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        align_param_gather=aligned,
        evaluate_between=True,
        deallocate=False,
        trace=True,
    )


CUTS = [(1, None), (2, None), (2, 2), (4, 2)]
TRACED = [traced(pp, vp, aligned) for pp, vp in CUTS for aligned in (False, True)]


@pytest.fixture(scope="module")
def traces() -> dict[tuple[Case, str], Outcome]:
    # Megatron's batched exchange is wrong in its values at P=2 V=2, not in its order.
    jobs = [Job(dataclasses.replace(case, engine=engine)) for case in TRACED for engine in ("megatron", "ours")]
    results = run_jobs(jobs, deadline=200)
    return {
        (dataclasses.replace(job.case, engine="ours"), job.case.engine): o for job, o in zip(jobs, results, strict=True)
    }


def comparable(lines: list[str]) -> list[str]:
    """Return the lines without the timers of single transfers (Megatron's communicator has them) and without an empty
    no_sync.

    Megatron enters no_sync in evaluation and never leaves it; ours does not enter it there.
    """
    kept = [line for line in lines if not (line.startswith("timer") and ("-recv" in line or "-send" in line))]
    text = re.sub(r"((?:no_sync \d enter\n)+)((?:no_sync \d exit\n)+)", _unless_as_many, "\n".join(kept) + "\n")
    training, _, evaluation = text.partition("timer forward-backward stop\n")
    evaluation = "\n".join(line for line in evaluation.splitlines() if not line.startswith("no_sync"))
    return [*training.splitlines(), "-- evaluation --", *evaluation.splitlines()]


def _unless_as_many(match: re.Match[str]) -> str:
    """Return nothing for an empty no_sync: as many are left as were entered."""
    return "" if match[1].count("\n") == match[2].count("\n") else match[0]


@pytest.mark.parametrize(
    "case", TRACED, ids=lambda case: f"{case.label()} {'aligned' if case.align_param_gather else ''}"
)
def test_hooks_fire_where_megatrons_schedule_fires_them(case: Case, traces: dict[tuple[Case, str], Outcome]) -> None:
    """The same calls of step functions, no_sync, param_sync, grad_sync, timers and finalisation, in the same order."""
    ours, theirs = traces[(case, "ours")], traces[(case, "megatron")]
    assert ours.status == "ok", ours.message
    assert theirs.status == "ok", theirs.message
    for rank in range(case.world):
        expected = comparable(theirs.traces[rank])
        assert any(line.startswith("finalize") for line in expected)
        assert comparable(ours.traces[rank]) == expected, f"rank {rank}"

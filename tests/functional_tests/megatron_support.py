"""Running lists of Megatron-core cases from tests: one set of processes for many cases, one outcome per test."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from testkit.megatron import groups
from testkit.megatron.cases import Case, Job, Model, Outcome
from testkit.megatron.runner import run_jobs

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)


def schedules_source(checkout: str = "") -> str:
    """The source of the schedules of the Megatron in the folder ``checkout``, or of the installed one, which is the
    first on the path; empty where there is none. Nothing of Megatron is imported."""
    found = importlib.util.find_spec("megatron")
    installed = [str(Path(one).parent) for one in (found.submodule_search_locations or ())] if found else []
    roots = [checkout] if checkout else installed
    files = [Path(root, "megatron/core/pipeline_parallel/schedules.py") for root in roots]
    return next((one.read_text(encoding="utf-8") for one in files if one.is_file()), "")


def assert_equal(outcome: object) -> None:
    """Losses, gradients and, where compared, parameters are equal to the last bit, and something was compared."""
    assert outcome.status == "ok", f"{outcome.status}: {outcome.message}"  # type: ignore[attr-defined]
    assert outcome.compared > 0  # type: ignore[attr-defined]
    assert outcome.grad_size > 1e-3, "gradients that are all zero prove nothing"  # type: ignore[attr-defined]
    assert outcome.loss_difference == 0.0  # type: ignore[attr-defined]
    assert outcome.grad_difference == 0.0  # type: ignore[attr-defined]
    assert outcome.param_difference in (None, 0.0)  # type: ignore[attr-defined]
    assert outcome.note_difference in (None, 0.0)  # type: ignore[attr-defined]


def beside_megatrons_schedule(cases: Iterable[Case], folder: object, checkout: str) -> dict[Case, Outcome]:
    """What becomes of each case beside Megatron's own schedule; ``folder`` for what both train from, ``checkout``: of
    the Megatron in there, where it names a folder."""
    jobs: list[Job] = groups.compared_with_megatron([*cases], str(folder))
    found = run_jobs(jobs, 60.0 * len(jobs), None, checkout or None)
    return {job.case: outcome for job, outcome in zip(jobs, found, strict=True)}


def in_megatrons_process(function: Callable[[Case], Any]) -> Any:
    """What ``function``, a module's, returns in a process in which Megatron's calls to CUDA are redirected; as JSON."""
    check = f"{function.__module__}:{function.__name__}"
    (outcome,) = run_jobs([Job(Case(Model(layers=1)), check=check)], deadline=120.0)
    assert outcome.status == "ok", outcome.message
    return outcome.facts[0]

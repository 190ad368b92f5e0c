"""Runs lists of Megatron-core cases for tests: one set of processes for many cases, and one outcome per test."""

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
    """Return the source of the schedules of the Megatron in the folder ``checkout``, or of the first one on the path;
    empty if there is none. Megatron is not imported."""
    found = importlib.util.find_spec("megatron")
    installed = [str(Path(one).parent) for one in (found.submodule_search_locations or ())] if found else []
    roots = [checkout] if checkout else installed
    files = [Path(root, "megatron/core/pipeline_parallel/schedules.py") for root in roots]
    return next((one.read_text(encoding="utf-8") for one in files if one.is_file()), "")


def assert_equal(outcome: object) -> None:
    """Assert that losses, gradients and, if compared, parameters have equal bits, and that some were compared."""
    assert outcome.status == "ok", f"{outcome.status}: {outcome.message}"  # type: ignore[attr-defined]
    assert outcome.compared > 0  # type: ignore[attr-defined]
    assert outcome.grad_size > 1e-3, "gradients that are all zero prove nothing"  # type: ignore[attr-defined]
    assert outcome.loss_difference == 0.0  # type: ignore[attr-defined]
    assert outcome.grad_difference == 0.0  # type: ignore[attr-defined]
    assert outcome.param_difference in (None, 0.0)  # type: ignore[attr-defined]
    assert outcome.note_difference in (None, 0.0)  # type: ignore[attr-defined]


def beside_megatrons_schedule(cases: Iterable[Case], folder: object, checkout: str) -> dict[Case, Outcome]:
    """Run each case under Megatron's own schedule and under the engine, and return the outcomes. ``folder``: for the
    files from which both train. ``checkout``: the folder of the Megatron to run, or empty for the installed one."""
    jobs: list[Job] = groups.compared_with_megatron([*cases], str(folder))
    found = run_jobs(jobs, 60.0 * len(jobs), None, checkout or None)
    return {job.case: outcome for job, outcome in zip(jobs, found, strict=True)}


def in_megatrons_process(function: Callable[[Case], Any]) -> Any:
    """Call ``function``, which is a module's function, in a process in which Megatron's calls to CUDA are redirected;
    return its result, which travels as JSON."""
    check = f"{function.__module__}:{function.__name__}"
    (outcome,) = run_jobs([Job(Case(Model(layers=1)), check=check)], deadline=120.0)
    assert outcome.status == "ok", outcome.message
    return outcome.facts[0]

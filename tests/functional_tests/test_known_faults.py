"""Faults of Megatron-core's own schedules that `megatron-pp check` names, in the installed release."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.functional_tests.megatron_support import needs_megatron

from testkit.megatron.cases import Case, Job, Model  # isort: skip
from testkit.megatron.runner import parity_jobs, run_jobs  # isort: skip

pytestmark = needs_megatron


def test_varying_shapes_on_two_ranks_crash_megatrons_schedule(tmp_path: Path) -> None:
    """The shapes of an output and of a gradient reach each other's receivers; gloo refuses what then arrives. This
    engine runs the same case."""
    theirs = Case(engine="megatron", pp=2, vp=2, policy="plain", variable_shapes=True).short()
    ours = dataclasses.replace(theirs, engine="ours")
    *_, crashed, right = run_jobs(parity_jobs([theirs, ours], tmp_path), deadline=120)
    assert crashed.status == "error", crashed.message
    assert (right.status, right.grad_difference) == ("ok", 0.0), right.message


def test_a_recomputed_mlp_with_a_bias_recomputes_itself_without_end() -> None:
    """Without tensor parallelism too. The check ends it at a depth that no layer needs."""
    again = ("recompute_granularity", "selective"), ("recompute_modules", ("mlp",))
    models = [Model(layers=2, extra_config=(("add_bias_linear", bias), *again)) for bias in (True, False)]
    check = "tests.functional_tests.megatron_layer_checks:depth_of_recomputation"
    with_bias, without = run_jobs([Job(Case(model, microbatches=2), check=check) for model in models])
    assert (with_bias.facts, without.facts) == ([4], [1]), (with_bias.message, without.message)

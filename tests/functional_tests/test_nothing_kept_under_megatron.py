"""A failed step under ``install()`` leaves nothing, with Python's cyclic collector off;
``test_nothing_kept_of_failures.py`` checks the same for the library."""

from __future__ import annotations

import pytest

from testkit.megatron.cases import Case, Job, Model
from testkit.megatron.runner import run_jobs
from tests.functional_tests.megatron_support import needs_megatron

pytestmark = [needs_megatron, pytest.mark.slow]

SMALL = Model(layers=4)
CASES = {
    "1f1b": Case(SMALL, pp=2, microbatches=4),
    "interleaved, overlapped": Case(SMALL, pp=2, vp=2, microbatches=4, policy="overlap"),
    "variable shapes": Case(SMALL, pp=2, microbatches=4, variable_shapes=True),
    "zb_h1": Case(SMALL, pp=2, microbatches=4, policy="overlap", schedule="zb_h1"),
    "zb_v": Case(SMALL, pp=2, vp=2, microbatches=4, policy="overlap", schedule="zb_v"),
    "distributed optimizer": Case(SMALL, pp=2, microbatches=4, optimizer="distributed", overlap_grad_reduce=True),
}


@pytest.mark.parametrize("check", ["left_of_a_forward", "left_of_a_backward"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_of_a_step_that_failed_is_kept(name: str, check: str) -> None:
    (outcome,) = run_jobs([Job(CASES[name], check=f"tests.functional_tests.megatron_leak_checks:{check}")])
    assert outcome.status == "ok", outcome.message
    for rank, found in enumerate(outcome.facts):
        assert found["error"].startswith(("PipelinePeerError", "InjectedError")[rank])
        assert found["seen"] > 4, "activations were watched"
        assert (found["left"], found["threads"]) == ({}, []), f"rank {rank} raised {found['error']}"

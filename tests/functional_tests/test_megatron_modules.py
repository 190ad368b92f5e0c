"""Megatron-core's pipelines of several modules under `install()`: equal to the last bit to its own schedule.

The tests need a Megatron whose schedules support them, such as the main branch: the installed one, or the checkout that
the environment variable MEGATRON_CHECKOUT names.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from testkit.models.module_grids import module_on
from testkit.models.module_models import Setup, in_one_process
from testkit.processes import run_processes
from tests.functional_tests.megatron_module_checks import MegatronCase, handed_back, own_and_ours
from tests.functional_tests.megatron_support import schedules_source
from tests.functional_tests.numbers.several_modules import SETUPS, assert_equal

CHECKOUT = os.environ.get("MEGATRON_CHECKOUT", "")


# The backward of 0.17 raises an AssertionError for gradients in lists, but its communicator returns lists.
pytestmark = pytest.mark.skipif(
    "_unwrap_single_tensor_list" not in schedules_source(CHECKOUT),
    reason="pipelines of several modules run on Megatron-core 0.18 on",
)

LINES = Setup(
    (module_on("vision", pp=2), module_on("audio", pp=2), module_on("llm", 2, pp=2)),
    {"vision": ["llm"], "audio": ["llm"]},
    microbatches=5,
)
SERVED = (
    "an encoder",
    "two encoders on one rank",
    "fan-in",
    "fan-out",
    "replicas apart, tensor-parallel",
    "equal replicas",
)
CASES = {name: MegatronCase(SETUPS[name]) for name in SERVED} | {
    "two encoders on a line": MegatronCase(LINES),
    "tokens are counted": MegatronCase(LINES, per_token=True),
    "a function syncs gradients": MegatronCase(LINES, grad_sync=True),
    "outputs are freed": MegatronCase(dataclasses.replace(LINES, config={"deallocate_pipeline_outputs": True})),
    "evaluation": MegatronCase(dataclasses.replace(LINES, forward_only=True)),
    "reduced over replicas in backwards": MegatronCase(SETUPS["fan-in"], ddp=True),
    "image tokens, of some samples none": MegatronCase(
        Setup((module_on("vision"), module_on("llm", 1, dp=2)), {"vision": ["llm"]}), images=True
    ),
    "few microbatches": MegatronCase(dataclasses.replace(LINES, microbatches=2)),
    # Not under Megatron's own schedule. The shorter encoder's warm-up sends more than the language model has received
    # when it sends its first gradient: each waits for the other. Of an output that goes to two modules Megatron keeps
    # the last gradient alone.
    "pipelines of unequal length": MegatronCase(SETUPS["pipelines of unequal length"], hangs=True),
    "one output for two modules": MegatronCase(SETUPS["one output for two modules"], hangs=True),
    # Megatron cuts the gradient equally, and ends in "invalid gradient".
    "fan-in of unequal batches": MegatronCase(SETUPS["fan-in of unequal batches"], hangs=True),
}


def size_of(case: MegatronCase) -> int:
    ranks = [rank for module in case.setup.modules for stages in module.ranks for stage in stages for rank in stage]
    return 1 + max(ranks)


def with_tensors(steps: list[Any]) -> list[Any]:
    """Return the steps of a rank, with tensors in place of arrays."""
    return [
        (losses, {at: [t if t is None else torch.from_numpy(t) for t in own] for at, own in gradients.items()}, events)
        for losses, gradients, events in steps
    ]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """Return by case, for each rank, the steps of Megatron's schedule and of the engine."""
    outcomes: dict[str, list[Any]] = {}
    for size in sorted(set(map(size_of, CASES.values()))):
        names = [name for name, case in CASES.items() if size_of(case) == size]
        job = CHECKOUT, [CASES[name] for name in names]
        ranks = run_processes(own_and_ours, size, job, timeout=240, start_method="mixed")
        outcomes |= {name: [tuple(map(with_tensors, rank[k])) for rank in ranks] for k, name in enumerate(names)}
    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_hooks_are_those_of_megatrons_schedule(name: str, found: dict[str, list[Any]]) -> None:
    case, ranks = CASES[name], found[name]
    for own, ours in () if case.hangs else ranks:
        for (losses, gradients, happened), (their_losses, theirs, their_events) in zip(ours, own, strict=True):
            assert losses == their_losses
            # In evaluation Megatron enters no_sync too, and does not leave it.
            assert happened == their_events[their_events[0] == "no_sync" and case.setup.forward_only :]
            for place, tensors in gradients.items():
                for one, other in zip(tensors, theirs[place], strict=True):
                    assert (one is None and other is None) or torch.equal(one, other), place
    if not (case.per_token or case.ddp or case.images):
        assert_equal(case.setup, [[step[:2] for step in ours] for _, ours in ranks], in_one_process(case.setup))


def test_unserved_steps_of_several_modules_run_on_megatron_with_the_reason_logged() -> None:
    case = MegatronCase(SETUPS["an encoder"])
    reasons, others = run_processes(handed_back, 2, (CHECKOUT, case), timeout=120)
    assert reasons == others
    assert "several modules with pipeline_schedule 'zb_h1'" in reasons[0]
    assert "several modules with p2p_channels 'shared'" in reasons[1]

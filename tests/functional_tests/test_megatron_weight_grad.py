"""Split backwards of Megatron-core's own layers: GPTModel and its tensor-parallel linear layers under zero bubble.

Gradients are compared in ``main_grad`` of Megatron's DistributedDataParallel, to the last bit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.functional_tests.megatron_support import assert_equal, needs_megatron

from tests.megatron.cases import Case, Job, Model, Outcome  # isort: skip
from tests.megatron.runner import parity_jobs, run_jobs  # isort: skip

pytestmark = needs_megatron

SPLIT = Case(split_weight_grad=True, policy="overlap")
TIED = Model(tied=True, position="learned_absolute")

ONE_RANK_WIDE = [
    dataclasses.replace(SPLIT, pp=2, schedule="zb_h1"),
    dataclasses.replace(SPLIT, pp=2, schedule="zb_h1", policy="batched", variable_shapes=True),
    dataclasses.replace(SPLIT, pp=2, schedule="zb_h2", model=TIED),
    dataclasses.replace(SPLIT, pp=2, vp=2, schedule="interleaved_zb"),
    dataclasses.replace(SPLIT, pp=2, vp=2, schedule="interleaved_zb", policy="plain", model=TIED),
    dataclasses.replace(SPLIT, pp=2, schedule="auto"),
    dataclasses.replace(SPLIT, pp=2, schedule="zb_h1", model=Model(layers=4, experts=4)),
    dataclasses.replace(SPLIT, pp=4, schedule="zb_h1"),
    dataclasses.replace(SPLIT, pp=4, schedule="1f1b"),  # converted, and every backward whole
]

# Sequence parallelism: the layer's input is gathered again for the weight gradient.
WIDE = [
    Case(model=Model(layers=4), pp=2, tp=2, policy="overlap", microbatches=5),
    Case(model=Model(layers=4), pp=2, tp=2, vp=2, policy="overlap", microbatches=4),
]
FOUR_LAYERS = Case(model=Model(layers=4), pp=2, policy="overlap")
REPLICAS = [
    Case(
        model=Model(layers=4), pp=2, dp=2, policy="overlap", overlap_grad_reduce=True, optimizer="distributed", steps=2
    ),
    Case(model=Model(layers=4), pp=2, dp=2, policy="overlap", optimizer="adam", steps=2),
]


def _name(case: Case) -> str:
    return f"{case.schedule} {case.label()}"


def _split(case: Case) -> Case:
    return dataclasses.replace(case, schedule="interleaved_zb" if case.vp else "zb_h1", split_weight_grad=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    directory = tmp_path_factory.mktemp("references")
    jobs = parity_jobs(ONE_RANK_WIDE, directory)
    for number, case in enumerate(WIDE + REPLICAS):
        path = str(Path(directory) / f"whole{number}-{{rank}}.pt")
        jobs += [Job(case, save=path), Job(_split(case), reference=path)]
    return {job.case: outcome for job, outcome in zip(jobs, run_jobs(jobs, deadline=400), strict=True)}


@pytest.mark.parametrize("case", ONE_RANK_WIDE, ids=_name)
def test_split_gradients_equal_one_process(case: Case, outcomes: dict[Case, Outcome]) -> None:
    assert_equal(outcomes[case])


@pytest.mark.parametrize("case", WIDE, ids=_name)
def test_with_tensor_and_sequence_parallelism_split_gradients_equal_whole_ones(
    case: Case, outcomes: dict[Case, Outcome]
) -> None:
    assert_equal(outcomes[_split(case)])


@pytest.mark.parametrize("case", REPLICAS, ids=_name)
def test_with_replicas_and_an_optimizer_parameters_are_equal_after_two_steps(
    case: Case, outcomes: dict[Case, Outcome]
) -> None:
    assert_equal(outcomes[_split(case)])

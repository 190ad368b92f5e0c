"""Ranks may differ in the fields of ``PRIVATE_FIELDS``: pipelines whose ranks run programs of different plans."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_pp.errors import PlanError
from megatron_pp.faults.attach import PRIVATE_FIELDS, describe_step
from megatron_pp.plan.builder import lowered_plan
from megatron_pp.plan.ir.spec import ANY_WAIT, ONE_QUEUE, Plan, PlanSpec
from megatron_pp.plan.verify.rendezvous import check_rendezvous
from megatron_pp.plan.verify.verifier import verify
from megatron_pp.runtime.engine.compute import Shapes
from megatron_pp.testing.toy import ToyData, ToyResult, merged, reference_run
from megatron_pp.weight_grad import split_weight_grad
from testkit.inputs.drawn_specs import NAMED, drawn_spec
from testkit.sweeps import EXHAUSTIVE
from testkit.thread_runs.step_runs import Rank, pipeline


def mixture(spec: PlanSpec, rng: random.Random) -> tuple[Plan, set[str]]:
    """A plan whose rank r has the program of a plan of its own, which differs from ``spec`` in private fields; and the
    fields in which ranks differ."""
    plans = []
    for _ in range(spec.pipeline_size):
        other = drawn_spec(spec.schedule, rng)
        mine: dict[str, Any] = {name: getattr(other, name) for name in PRIVATE_FIELDS}
        # Pairs do not go with offloading.
        some = (0,) if spec.overlap_pairs else (None, 0, 1, spec.num_chunks)
        mine |= {"offload_chunks": rng.choice(some), "offload_slots": rng.randint(1, 3)}
        plans.append(lowered_plan(replace(spec, **mine)))
    for plan in plans:
        verify(plan)
    programs = tuple(plan.programs[rank] for rank, plan in enumerate(plans))
    differ = {name for name in PRIVATE_FIELDS if len({getattr(plan.spec, name) for plan in plans}) > 1}
    return Plan(spec, plans[0].placement, programs), differ


def test_private_fields_are_fields_of_a_spec() -> None:
    assert {*PlanSpec("1f1b", 2, 1, 2).values()} >= PRIVATE_FIELDS


@pytest.mark.parametrize("name", NAMED)
def test_ranks_that_differ_in_private_fields_neither_hang_nor_mix_up_messages(name: str) -> None:
    rng, seen = random.Random(f"private {name}"), set[str]()
    for _ in range(600 if EXHAUSTIVE else 12):
        plan, differ = mixture(drawn_spec(name, rng), rng)
        check_rendezvous(plan)  # as on gloo
        check_rendezvous(plan, plan.spec.device)
        seen |= differ
    assert seen == PRIVATE_FIELDS


CHANGES: dict[str, dict[str, Any]] = {
    "grad_sync": {"grad_sync_func": lambda parameters: None},
    "param_sync": {"param_sync_func": lambda parameters: None},
    "release_after": {"max_pending_sends": 5},
    "split_backward": {},
}
"""Field of a spec -> fields of a config that change it; "split_backward" is changed by the model."""


@pytest.mark.parametrize("changed", [0, 1], ids="of rank {}".format)
@pytest.mark.parametrize("field", CHANGES)
def test_one_rank_may_change_private_fields_between_two_steps(field: str, changed: int) -> None:
    """The peers do not know of the change, and compare nothing."""

    def train(rank: Rank) -> list[ToyResult]:
        model, results = rank.model(), list[ToyResult]()
        for _ in range(2):
            model[0].zero_grad()
            results.append(rank.result(model, rank.step(model)))
            if rank.rank == changed and len(results) == 1:
                vars(rank.config).update(CHANGES[field])
                if field == "split_backward":
                    split_weight_grad(model)
        return results

    fields = {"pipeline_schedule": "zb_h1", "overlap_p2p_comm": True, "p2p_timeout": 3.0}
    data = ToyData(4)
    for results in zip(*pipeline(2, 1, 4, train, data=data, guarded=True, **fields), strict=True):
        assert merged(results).difference(reference_run(2, data)) == 0.0


@pytest.mark.parametrize("field", ["device", "lookahead"])
def test_ranks_that_differ_in_shared_fields_raise_a_mismatch(field: str) -> None:
    """Some mixtures of plans that differ in these hang: see the test below."""
    spec = PlanSpec("1f1b", 2, 1, 4, device=(ONE_QUEUE, ANY_WAIT))
    other = replace(spec, **{"device": {"device": (ONE_QUEUE,)}, "lookahead": {"lookahead": 0}}[field])
    described = [describe_step(one, Shapes((1,), (1,)), torch.float32) for one in (spec, other)]
    assert described[0] != described[1]


def test_ranks_that_disagree_on_device_sync_would_hang_with_variable_shapes() -> None:
    """One groups its messages in calls, the other does not."""
    spec = PlanSpec("1f1b", 2, 1, 4, variable_shapes=True, device=(ONE_QUEUE, ANY_WAIT))
    plans = [lowered_plan(one) for one in (spec, replace(spec, device=(ONE_QUEUE,)))]
    programs = plans[0].programs[0], plans[1].programs[1]
    with pytest.raises(PlanError, match="deadlock under rendezvous"):
        check_rendezvous(Plan(spec, plans[0].placement, programs))

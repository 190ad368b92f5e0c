"""No wait for the device can hang a default plan of NCCL: the rule, and where lowering posts receives under it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.feature_table import CACHES, FSDP_COLLECTIVES
from megatron_pp.features.modules.modules_plan import lowered_modules, modules_spec
from megatron_pp.features.modules.modules_text import graphs_in
from megatron_pp.features.modules.modules_verify import verify_modules
from megatron_pp.plan.builder import build_plan, lowered_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.ir.instruction import BATCH, COMPUTE_OPS
from megatron_pp.plan.ir.spec import (
    ANY_WAIT,
    CHANNELS,
    DEVICE_SYNC,
    EXPLICIT,
    HOOKS,
    ON_NCCL,
    ONE_QUEUE,
    POLICIES,
    Plan,
    PlanSpec,
)
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.queues import Entry
from megatron_pp.plan.verify.rendezvous import RendezvousRun, check_rendezvous
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import edited, refusal
from testkit.sweeps import drawn as drawn_of

NAMED = [name for name, family in SCHEDULES.items() if family.search is None]
POSTED_AHEAD = (ONE_QUEUE,)
"""Receives are posted wherever one waiting rank alone does not hang."""


def drawn(rng: random.Random) -> PlanSpec | None:
    """A spec of any schedule, policy and feature; None where the schedule has no such plan."""
    name = rng.choice(NAMED)
    family = SCHEDULES[name]
    size, chunks, microbatches = rng.randint(2, 8), family.chunks or rng.randint(1, 4), rng.randint(1, 20)
    fields: dict[str, object] = {
        "policy": rng.choice(POLICIES),
        "channels": rng.choice(CHANNELS),
        "variable_shapes": rng.random() < 0.3,
        "forward_only": rng.random() < 0.2,
        "release_after": rng.choice((1, 1, 2, 3)),
        "lookahead": rng.choice((1, 1, 1, 0, 5)),
        "grad_sync": rng.choice((HOOKS, EXPLICIT)),
        "param_sync": rng.random() < 0.3,
        "overlap_pairs": rng.random() < 0.3,
        "split_backward": rng.random() < 0.7,
        "group_size": rng.choice((0, 0, 1, 2, size, size + 1, microbatches)),
        "device": (*ON_NCCL, DEVICE_SYNC) if rng.random() < 0.2 else ON_NCCL,
    }
    if rng.random() < 0.2:
        fields |= {"skip_tensors": "blocks", "skip_cache": rng.choice(CACHES)}
    if rng.random() < 0.15:
        fields["offload_chunks"] = rng.randint(0, chunks)
    if rng.random() < 0.15:
        fields["fsdp_collectives"] = rng.choice([one for one in FSDP_COLLECTIVES if one != "by_cost"])
    if family.sliced and rng.random() < 0.5:
        fields["slices"] = rng.randint(1, 4)
    try:
        spec = PlanSpec(name, size, chunks, microbatches, **fields)  # type: ignore[arg-type]
        lowered_plan(spec)
    except PlanError:
        return None
    return spec


def drawn_specs(seed: int, count: int) -> Iterator[PlanSpec]:
    rng = random.Random(seed)
    while count:
        spec = drawn(rng)
        if spec is not None:
            count -= 1
            yield spec


class SomeWait(RendezvousRun):
    """Only the instructions in ``chosen`` (rank, position) wait."""

    def __init__(self, plan: Plan, chosen: set[tuple[int, int]]) -> None:
        self.chosen = chosen
        super().__init__(plan, list(ON_NCCL), 1)

    def unfinished(self, rank: int) -> list[Entry]:
        found = super().unfinished(rank)
        return found if (rank, self.at[rank]) in self.chosen else []


def ends(plan: Plan, chosen: set[tuple[int, int]]) -> bool:
    run = SomeWait(plan, chosen)
    run.upto([len(program) for program in plan.programs])
    try:
        run.check_end()
    except PlanError:
        return False
    return True


def subsets(plan: Plan, rng: random.Random) -> Iterator[set[tuple[int, int]]]:
    places = [(rank, k) for rank, program in enumerate(plan.programs) for k in range(len(program))]
    for share in (0.02, 0.1, 0.5, 1.0):
        yield {place for place in places if rng.random() < share}


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "gis_h", "dualpipe_v"])
def test_receives_posted_ahead_hang_where_two_ranks_wait(name: str) -> None:
    spec = PlanSpec(name, 4, SCHEDULES[name].chunks or 2, 8, device=POSTED_AHEAD)
    plan = lowered_plan(spec)
    verify(plan)
    assert "which may wait for the device" in refusal(plan, ANY_WAIT)
    rng = random.Random(name)
    assert not all(ends(plan, chosen) for _ in range(20) for chosen in subsets(plan, rng))


def test_the_two_ranks_that_wait_for_each_other_are_named() -> None:
    plan = lowered_plan(PlanSpec("1f1b", 2, 1, 4, device=POSTED_AHEAD))
    assert refusal(plan, ANY_WAIT) == (
        "deadlock under any_wait: rank 0 waits at SEND_F0.1, which may wait for the device, for rank 1 to post the "
        "send that matches RECV_B0.0; rank 1 waits at B0.0, which may wait for the device, for rank 0 to post the send "
        "that matches RECV_F0.1"
    )


def operations(plan: Plan) -> set[tuple[int, int]]:
    return {
        (rank, k) for rank, program in enumerate(plan.programs) for k, at in enumerate(program) if at.op in COMPUTE_OPS
    }


@pytest.mark.parametrize(("name", "safe"), [("gpipe", True), ("breadth_first", True), ("1f1b", False), ("zb_v", False)])
def test_operations_alone_do_not_hang_where_messages_go_one_way_at_a_time(name: str, safe: bool) -> None:
    plan = lowered_plan(PlanSpec(name, 4, SCHEDULES[name].chunks or 2, 8, device=POSTED_AHEAD))
    assert ends(plan, operations(plan)) == safe


@pytest.mark.slow
@pytest.mark.parametrize("seed", drawn_of(range(4), 2))
def test_drawn_plans_of_every_schedule_policy_and_feature_run_whatever_waits(seed: int) -> None:
    rng = random.Random(seed)
    for spec in drawn_specs(seed, 25):
        plan = lowered_plan(spec)
        assert verify(plan).device == spec.device, spec
        assert all(ends(plan, chosen) for chosen in subsets(plan, rng)), spec


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_default_plans_of_all_sizes_run_whatever_waits(name: str) -> None:
    """Half of the sizes, which a run draws for each schedule."""
    every_chunks = (SCHEDULES[name].chunks,) if SCHEDULES[name].chunks else (1, 2, 3)
    sizes = [(name, *one) for one in product((2, 3, 4, 5, 8), every_chunks, (2, 5, 8, 17))]
    for _, size, chunks, microbatches in drawn_of(sizes, len(sizes) // 2):
        spec = PlanSpec(name, size, chunks, microbatches, device=ON_NCCL)
        check_rendezvous(lowered_plan(spec), ON_NCCL)
        assert ANY_WAIT in build_plan(spec).certificate.rules  # type: ignore[union-attr]


def test_a_receive_is_posted_before_the_operation_that_runs_while_its_message_is_made() -> None:
    """Rank 0's forward ends before rank 1's backward. So rank 1 posts its receive ahead, and rank 0 does not."""
    plan = lowered_plan(PlanSpec("1f1b", 2, 1, 4, device=ON_NCCL))
    assert str(plan).splitlines() == [
        "rank 0: F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 FREE_F0.0 WAIT_B0.0 B0.0 RECV_B0.1 FREE_F0.1 F0.2 SEND_F0.2 "
        "WAIT_B0.1 B0.1 FREE_F0.2 F0.3 SEND_F0.3 RECV_B0.2 WAIT_B0.2 B0.2 RECV_B0.3 FREE_F0.3 WAIT_B0.3 "
        "ENABLE_GRAD_SYNC0 B0.3",
        "rank 1: RECV_F0.0 WAIT_F0.0 RECV_F0.1 F0.0 B0.0 SEND_B0.0 WAIT_F0.1 F0.1 FREE_B0.0 B0.1 SEND_B0.1 RECV_F0.2 "
        "WAIT_F0.2 F0.2 RECV_F0.3 FREE_B0.1 B0.2 SEND_B0.2 WAIT_F0.3 F0.3 FREE_B0.2 ENABLE_GRAD_SYNC0 B0.3 SEND_B0.3 "
        "FREE_B0.3",
    ]
    early = edited(plan, 1, "move RECV_F0.2 behind F0.1")
    assert "rank 1 waits at FREE_B0.0, which may wait for the device" in refusal(early, ANY_WAIT)


def test_sends_and_receives_of_one_boundary_are_in_the_order_in_which_messages_are_made() -> None:
    plan = lowered_plan(PlanSpec("interleaved_1f1b", 2, 2, 4, device=ON_NCCL))
    assert "SEND_F0.1 RECV_F1.0" in str(plan)
    turned = edited(plan, 0, "move RECV_F1.0 behind F0.1")
    assert refusal(turned, ANY_WAIT)


def test_nothing_is_posted_ahead_without_look_ahead() -> None:
    spec = PlanSpec("interleaved_1f1b", 4, 2, 8, device=ON_NCCL)
    none_ahead = lowered_plan(replace(spec, lookahead=0)).programs
    assert none_ahead == lowered_plan(replace(spec, device=(*ON_NCCL, DEVICE_SYNC))).programs
    assert none_ahead != lowered_plan(spec).programs == lowered_plan(replace(spec, lookahead=3)).programs


@pytest.mark.parametrize(("name", "most"), [("1f1b", 1.0), ("interleaved_1f1b", 1.0), ("zb_h1", 1.0), ("gis_h", 1.0)])
def test_a_step_takes_no_longer_than_with_receives_that_can_hang(name: str, most: float) -> None:
    for size, microbatches in ((2, 8), (4, 8), (8, 16)):
        spec = PlanSpec(name, size, SCHEDULES[name].chunks or 2, microbatches, device=ON_NCCL)
        for transfer in (0.1, 0.25, 0.5):
            steps = [_step(lowered_plan(replace(spec, device=rules)), transfer) for rules in (ON_NCCL, POSTED_AHEAD)]
            assert steps[0] <= most * steps[1] * (1 + 1e-9), (spec, transfer)


def _step(plan: Plan, transfer: float) -> float:
    network = Network(1.0, link=Link(bandwidth=1 / transfer))
    return simulate(plan, StageCosts.uniform(plan.placement.num_stages), network, (ONE_QUEUE,)).makespan


def test_messages_of_varying_shapes_go_out_as_one_call_a_round() -> None:
    spec = PlanSpec("interleaved_1f1b", 4, 2, 8, variable_shapes=True, device=ON_NCCL)
    plan = lowered_plan(spec)
    assert spec.grouped
    assert {at.op for program in plan.programs for at in program if at.op.startswith(("SEND", "RECV"))} == set()
    assert BATCH in {at.op for at in plan.programs[0]}
    verify(plan)
    apart = lowered_plan(replace(spec, device=POSTED_AHEAD))
    assert not apart.spec.grouped
    assert "which may wait for the device" in refusal(apart, ANY_WAIT)
    assert _step(plan, 0.5) < _step(apart, 0.5)


@pytest.mark.parametrize("shapes_vary", [False, True])
@pytest.mark.parametrize(
    "text",
    ["vision=0/1; llm=2,3; vision>llm", "a=0,1; b=2/3; c=4,5; a>b; b>c; a>c", "v#0*1/2=0,1,2; llm#1*1/2=0,1,2; v>llm"],
)
def test_pipelines_of_several_modules_run_whatever_waits(text: str, shapes_vary: bool) -> None:
    graph = graphs_in(text)[0]
    for microbatches in (1, 4, 7):
        plan = lowered_modules(modules_spec(graph, microbatches, variable_shapes=shapes_vary, device=ON_NCCL))
        assert ANY_WAIT in verify_modules(plan).certificate.rules
        usual = lowered_modules(modules_spec(graph, microbatches, variable_shapes=shapes_vary, device=POSTED_AHEAD))
        with pytest.raises(PlanError, match="which may wait for the device"):
            verify_modules(usual, ON_NCCL)


def test_each_member_of_a_pair_may_wait() -> None:
    """Rank 1 sends its forward's output within the pair, and may wait for the device before the pair's backward."""
    spec = PlanSpec("interleaved_1f1b", 2, 2, 4, overlap_pairs=True, device=ON_NCCL)
    plan = edited(lowered_plan(spec), 0, "move RECV_B0.0 before RECV_F1.2")
    assert "rank 1 waits at (F0.2 SEND_F0.2 B0.0 SEND_B0.0), which may wait for the device" in refusal(plan, ANY_WAIT)

"""Schedules whose output layer is split over all ranks: their memory, their step, and what ``verify`` catches."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.features.output_layer.output_instructions import REDUCE, WAIT_REDUCE
from megatron_pp.plan.builder import build_plan, lowered_plan, verified_plan
from megatron_pp.plan.costs.stage_costs import Link, Network, StageCosts
from megatron_pp.plan.io.serialize import format_plan
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.placement import Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.simulate.memory import ModelShape, peak_bytes, rank_memory
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import edited, refusal
from testkit.mutants.plan_mutants import mutants

MICROBATCHES_MORE = {"vocab_1f1b": 1, "vocab_1f1b_alg1": 2}  # than 1F1B
NAMES = sorted(MICROBATCHES_MORE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_hold_as_many_microbatches_as_the_paper_says(name: str, size: int) -> None:
    """p + 2 and p + 1 on rank 0 (arXiv 2411.05288, section 5), and no more logits than of one microbatch."""
    _, verdict = verified_plan(PlanSpec(name, size, 1, 3 * size + 2))
    assert verdict.activations == tuple(size - rank + MICROBATCHES_MORE[name] for rank in range(size))
    assert all(peaks.each.logits == 1 for peaks in verdict.ranks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("output", [0.6, 2.4, 6.0], ids="{} layers".format)
def test_a_step_takes_no_longer_than_balanced_stages(name: str, output: float) -> None:
    """Four ranks of four layers, whose forward is 1 and backward 2; the output layer costs so many layers more."""
    size, microbatches, layers = 4, 32, 4.0
    costs = replace(StageCosts.uniform(size, layers, layers, layers), output_layer=(output,) * 3)
    network = Network(link=Link(latency=0.02 * layers))
    balanced = microbatches * 3 * (layers + output / size) + (size - 1) * 3 * layers
    step = simulate(build_plan(PlanSpec(name, size, 1, microbatches)), costs, network).makespan
    assert step < 1.03 * balanced
    on_last_stage = simulate(build_plan(PlanSpec("1f1b", size, 1, microbatches)), costs, network).makespan
    assert on_last_stage > (1 + 0.7 * output / layers) * step / (1 + output / size / layers)


def test_ranks_share_the_output_layers_memory() -> None:
    """Each has a quarter of the table and of the logits; without them the ranks differ by the embedding alone."""
    shape = ModelShape(num_layers=8, hidden_size=64, seq_length=32, vocab_size=50_000)
    static = [rank_memory(build_plan(PlanSpec("vocab_1f1b", 4, 1, 8)), rank, shape).static for rank in range(4)]
    table = shape.vocab_size * shape.hidden_size * shape.bytes_per_parameter
    none = replace(shape, vocab_size=0).static_bytes([1], 4)
    assert static == pytest.approx([none + 1.25 * table, *[none + 0.25 * table] * 3])
    whole, split = (peak_bytes(build_plan(PlanSpec(name, 4, 1, 8)), shape) for name in ("1f1b", "vocab_1f1b"))
    assert whole[3] - split[3] > 0.75 * table + 0.5 * shape.logits_bytes


def test_pytorchs_format_has_no_split_output_layer() -> None:
    with pytest.raises(PlanError, match="passes of a split output layer"):
        format_plan(build_plan(PlanSpec("vocab_1f1b", 3, 1, 5)), "torch-csv")


def test_a_split_output_layer_has_one_chunk_a_rank() -> None:
    with pytest.raises(ValueError, match="1 or 2 barriers and one chunk a rank"):
        Placement("loop", 2, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_at_least_four_mutants_of_each_new_instruction_are_caught(name: str) -> None:
    """Dropped, repeated, exchanged or moved: refused, or harmless where it stays within its bounds."""
    plan, caught = build_plan(PlanSpec(name, 3, 1, 5)), Counter[str]()
    for what, mutant in mutants(plan, random.Random(7), per_instruction=3):
        op = next((op for op in ins.RANKWIDE_OPS if f", {op}0" in what), None)
        if op is None:
            continue
        try:
            verify(mutant, device=("one_queue",))
        except PlanError:
            caught[op] += 1
        else:
            assert what.startswith(("move", "swap")), what
            assert {*map(str, mutant.programs[0])} == {*map(str, plan.programs[0])}, what
    used = ins.RANKWIDE_OPS - ({REDUCE, WAIT_REDUCE} if plan.placement.barriers == 1 else set())
    assert all(caught[op] >= 4 for op in used), caught


def test_verify_refuses_a_last_pass_without_its_gradient_sync() -> None:
    plan = edited(build_plan(PlanSpec("vocab_1f1b", 2, 1, 3)), 0, "drop ENABLE_GRAD_SYNC0")
    assert "no ENABLE_GRAD_SYNC0 stands before it: it completes the output layer's gradient" in refusal(plan)


def test_verify_accepts_collectives_next_to_messages_of_varying_shapes() -> None:
    verify(lowered_plan(PlanSpec("vocab_1f1b", 2, 1, 3, variable_shapes=True)))


def test_ranks_post_their_collectives_in_one_order() -> None:
    plan = build_plan(PlanSpec("vocab_1f1b_alg1", 3, 1, 6))
    first = [at for at in plan.programs[0] if at.op in ins.COLLECTIVE_POSTS]
    assert all([at for at in program if at.op in ins.COLLECTIVE_POSTS] == [
        at._replace(stage=rank) for at in first] for rank, program in enumerate(plan.programs))  # fmt: skip
    posts = {"BROADCAST0.2", "ALL_REDUCE0.1"}
    one, other = (str(at) for at in first if str(at) in posts)
    assert "all ranks post their collectives in one order" in refusal(edited(plan, 1, f"swap {one} {other}"))


def test_a_collective_that_a_rank_waits_for_before_all_have_posted_it_is_named() -> None:
    plan = edited(build_plan(PlanSpec("vocab_1f1b", 2, 1, 3)), 0, "move WAIT_BROADCAST0.0 before F0.1")
    for one in ("ALL_REDUCE0.0", "S0.0", "BROADCAST0.0"):
        plan = edited(plan, 1, f"move {one} behind F0.1")
    assert "rank 0 waits at WAIT_BROADCAST0.0 for rank 1 to post the collective" in refusal(plan)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("forward_only", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_losses_are_reported_in_the_order_of_microbatches(name: str, forward_only: bool, rank: int) -> None:
    """On the last stage's rank, which reports them where the statistics are there."""
    plan = build_plan(PlanSpec(name, 2, 1, 2, forward_only=forward_only))
    program, programs = list(plan.programs[rank]), [*plan.programs]
    end = next(k for k, at in enumerate(program) if str(at) == "WAIT_ALL_REDUCE0.1") + 1
    late = [at for at in program[:end] if str(at) in ("WAIT_ALL_REDUCE0.0", "T0.0", "REDUCE0.0", "WAIT_REDUCE0.0")]
    late += [at for at in program[:end] if rank == 1 and str(at) in ("B0.0", "SEND_B0.0")]
    programs[rank] = (*(at for at in program[:end] if at not in late), *late, *program[end:])
    mutant = replace(plan, programs=tuple(programs), orders=())
    if rank == 1:
        with pytest.raises(PlanError, match=r"WAIT_ALL_REDUCE0\.1 .* next loss of chunk 0 is that of microbatch 0"):
            verify(mutant)
    elif forward_only or plan.placement.barriers == 1:  # its REDUCE would stand behind another collective
        verify(mutant)

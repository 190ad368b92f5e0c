"""Sequences in slices: bubble and memory in closed form, causal order, keys and values, files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_pp.errors import FileFormatError, PlanError
from megatron_pp.features.slices.key_values import key_values_timeline
from megatron_pp.features.slices.slice_costs import slice_lengths, slice_shares
from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.activations import peak_activations
from megatron_pp.plan.costs.attention import attention_share
from megatron_pp.plan.costs.stage_costs import StageCosts
from megatron_pp.plan.io.serialize import format_plan
from megatron_pp.plan.ir.instruction import FORWARD
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.lower.lowering import lowered
from megatron_pp.plan.simulate.memory import FULL, ModelShape, rank_memory
from megatron_pp.plan.simulate.simulator import simulate
from megatron_pp.plan.verify.verifier import verify
from testkit.inputs.plan_text import edited, index_of, refusal, rows


@pytest.mark.parametrize(("size", "microbatches", "slices"), [(8, 4, 1), (8, 4, 8), (4, 2, 3), (1, 2, 4)])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (3.0, 3.0)])
def test_bubble_and_memory_of_seq_1f1b(size, microbatches, slices, forward, backward):
    """arXiv 2406.03488: bubble (P-1)/(nM+P-1), and (n+P-1-r)/n microbatches on rank r while n (M-1) >= P-1."""
    plan = build_plan(PlanSpec("seq_1f1b", size, 1, microbatches, slices=slices))
    result = simulate(plan, StageCosts.uniform(size, forward, backward / 2, backward / 2))
    total = slices * microbatches + size - 1
    assert result.bubble_share == pytest.approx((size - 1) / total, abs=1e-12)
    assert result.makespan == pytest.approx((forward + backward) * total / slices)
    if slices * (microbatches - 1) >= size - 1:
        peaks = [(slices + size - 1 - rank) / slices for rank in range(size)]
        assert peak_activations(plan) == pytest.approx(peaks, abs=1e-12)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_chunks_that_take_turns_have_a_bubble_as_much_smaller(slices):
    plan = build_plan(PlanSpec("interleaved_seq_1f1b", 4, 2, 8, slices=slices))
    result = simulate(plan, StageCosts.uniform(8, 0.5, 0.5, 0.5))
    assert result.bubble_share == pytest.approx(3 / (2 * slices * 8 + 3), abs=1e-12)


def test_weight_gradients_fill_the_bubble():
    """What (P-1)(F+B-W) leaves, of a slice's times: a third of seq_1f1b's."""
    plans = (build_plan(PlanSpec(name, 4, 1, 8, slices=4)) for name in ("seq_1f1b", "seq_zb"))
    whole, split = (simulate(plan, StageCosts.uniform(4)) for plan in plans)
    assert max(split.idle) == pytest.approx(max(whole.idle) / 3)


def test_slices_of_equal_length_are_unequal_under_attention():
    plan = build_plan(PlanSpec("seq_1f1b", 4, 1, 4, slices=4))
    costs = StageCosts.uniform(4)
    unequal = simulate(plan, replace(costs, attention=0.5))
    assert unequal.busy == pytest.approx(simulate(plan, costs).busy)
    assert unequal.makespan > 1.1 * simulate(plan, costs).makespan


def test_cuts_of_equal_cost():
    attention = attention_share(2048, 256, 1024)
    assert attention == pytest.approx(0.4)  # 2 s h beside 8 h^2 + 4 h f
    lengths = slice_lengths(2048, 4, attention)
    assert sum(lengths) == 2048
    assert list(lengths) == sorted(lengths, reverse=True)
    assert slice_shares(lengths, attention) == pytest.approx([0.25] * 4, abs=1e-3)
    assert sum(slice_shares((5, 1, 7), 0.3)) == pytest.approx(1.0)
    assert slice_shares((2, 2), 0.5) == pytest.approx((0.375, 0.625))
    assert slice_lengths(2048, 4) == (512,) * 4
    assert slice_lengths(5, 5, 1.0) == (1,) * 5  # none is empty
    assert slice_lengths(24, 2, 0.9, multiple=4) == (16, 8)


@pytest.mark.parametrize(("tokens", "slices", "attention"), [(10, 4, 0.0), (3, 4, 0.5), (8, 2, 1.5)])
def test_impossible_slice_lengths_are_refused(tokens, slices, attention):
    with pytest.raises(PlanError, match="must"):
        slice_lengths(tokens, slices, attention)


def test_whole_sequences_are_one_slice():
    assert "slices=2" in PlanSpec("seq_1f1b", 2, 1, 2, slices=2).describe()
    assert build_plan(PlanSpec("seq_1f1b", 2, 1, 2)).orders == build_plan(PlanSpec("1f1b", 2, 1, 2)).orders


# -- what verify refuses ---

REFUSED = """
seq_1f1b | 1 | swap B0.0s0 B0.0s1 | comes before B0.0s1: keys and values get gradients
seq_1f1b | 0 | swap F0.0s1 F0.1s0 | next forward of chunk 0 is that of microbatch 0, slice 1
seq_1f1b | 1 | drop B0.0s1 | comes before its backward ran
seq_1f1b | 0 | F0.0s1 with part=2 | slices 0..1
seq_1f1b | 0 | F0.0s1 with part=-1 | no such stage and microbatch
seq_1f1b | 0 | SEND_F0.0s1 with part=0 | occurs twice
seq_1f1b | 1 | RECV_F0.0s1 with part=0 | occurs twice
seq_1f1b | 0 | drop FREE_F0.0s0 | its output was released
seq_1f1b | 1 | drop SEND_B0.1s0 | comes before its input gradient was sent
seq_zb | 1 | swap I0.1s0 I0.1s1 | comes before I0.1s1: keys and values get gradients
seq_zb | 0 | swap I0.0s0 W0.0s0 | comes before its backward left the weight gradients
"""


@pytest.mark.parametrize(("name", "rank", "edit", "words"), rows(REFUSED))
def test_refuses_slices_out_of_order(name, rank, edit, words):
    assert words in refusal(edited(build_plan(PlanSpec(name, 2, 1, 2, slices=2)), int(rank), edit))


def test_an_order_with_ascending_backwards_is_refused_before_it_is_lowered():
    plan = build_plan(PlanSpec("seq_1f1b", 2, 1, 2, slices=2))
    ascending = [list(order) for order in plan.orders]
    for order in ascending:
        i, j = index_of(order, "B0.1s0"), index_of(order, "B0.1s1")
        order[i], order[j] = order[j], order[i]
    with pytest.raises(PlanError, match=r"B0\.1s1 has to come before it: keys and values"):
        lowered(plan.spec, plan.placement, ascending)


def test_schedules_without_slices_refuse_them():
    with pytest.raises(PlanError, match="1f1b runs sequences whole"):
        build_plan(PlanSpec("1f1b", 2, 1, 2, slices=2))
    with pytest.raises(PlanError, match="number of slices is 0"):
        PlanSpec("seq_1f1b", 2, 1, 2, slices=0)
    with pytest.raises(FileFormatError, match="no slices"):
        format_plan(build_plan(PlanSpec("seq_1f1b", 2, 1, 2, slices=2)), "torch-csv")


# -- memory ---


def test_keys_and_values_live_from_the_first_forward_to_its_backward():
    plan = build_plan(PlanSpec("seq_1f1b", 2, 1, 3, slices=2))
    kept = dict(zip(map(str, plan.programs[1]), key_values_timeline(plan, 1), strict=True))
    steps = ("F0.0s0", "F0.0s1", "B0.0s1", "F0.1s0", "B0.0s0", "B0.2s0")
    assert [kept[at] for at in steps] == [1, 1, 1.5, 2.5, 1, 0]  # half as much more: gradients of slice 0's
    assert verify(plan).ranks[1].each.key_values == 2
    evaluation = build_plan(PlanSpec("seq_1f1b", 2, 1, 3, forward_only=True, slices=2))
    assert verify(evaluation).ranks[0].each.key_values == 1
    assert list(key_values_timeline(evaluation, 0))[-1] == 0


@pytest.mark.parametrize("recompute", ["selective", FULL])
def test_memory_in_bytes_counts_keys_and_values(recompute):
    """One rank, one microbatch, at the end of the last slice's forward: all that the forward keeps, and where it is
    computed again, keys and values besides.
    """
    shape = ModelShape(num_layers=1, hidden_size=8, seq_length=16, recompute=recompute)
    whole, sliced = (build_plan(PlanSpec("seq_1f1b", 1, 1, 1, slices=slices)) for slices in (1, 4))
    extra = shape.layer_key_value_bytes if recompute == FULL else 0.0
    after = dict(zip(map(str, sliced.programs[0]), rank_memory(sliced, 0, shape).after, strict=True))
    assert after["F0.0s3"] == pytest.approx(max(rank_memory(whole, 0, shape).after) + extra)
    assert after["B0.0s0"] == 0
    forwards = [after[str(at)] for at in sliced.programs[0] if at.op == FORWARD]
    assert forwards == sorted(forwards)

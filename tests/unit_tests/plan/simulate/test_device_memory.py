"""All that a rank's GPU holds, against what was worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megatron_pp.plan.builder import build_plan
from megatron_pp.plan.costs.communicators import Outside
from megatron_pp.plan.ir.spec import BATCHED, OVERLAP, PLAIN, PlanSpec
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.simulate.device_memory import DeviceMemory, device_memory
from megatron_pp.plan.simulate.memory import FULL, SELECTIVE, ModelShape, Parts, rank_memory

MIB = 2**20
SHAPE = ModelShape(num_layers=4, hidden_size=8, seq_length=16, recompute=FULL)
MESSAGE = 16 * 8 * 2  # of bf16; a recomputed layer keeps its input, as large
PARAMETERS = 2 * 12 * 8 * 8 * (2 + 4 + 12)  # two layers of 4 h h + 2 h (4 h); parameter, gradient, optimizer


def memory_of(spec: PlanSpec, deallocate: bool = True) -> list[DeviceMemory]:
    plan = build_plan(spec)
    ranks = range(spec.pipeline_size)
    return [device_memory(plan, rank, rank_memory(plan, rank, SHAPE, deallocate), Outside()) for rank in ranks]


def test_two_ranks_by_hand() -> None:
    """Rank 0 begins with F0.0 SEND_F0.0 F0.1 RECV_B0.0: two forwards of two layers, two outputs, a posted receive.
    Rank 1 with RECV_F0.0 WAIT_F0.0 F0.0 RECV_F0.1: one such forward, whose input is a message, a posted receive."""
    first, last = memory_of(PlanSpec("1f1b", 2, 1, 2))
    assert (first.parameters, last.parameters) == (PARAMETERS, PARAMETERS)
    assert (first.allocated, first.at) == (Parts(2 * 2 * MESSAGE, 2 * MESSAGE, MESSAGE, 0), "RECV_B0.0")
    assert (last.allocated, last.at) == (Parts(2 * MESSAGE - MESSAGE, 0, 2 * MESSAGE, 0), "RECV_F0.1")
    for one in (first, last):
        assert one.of_communicators == 8 * (10 + 2) * MIB
        assert one.total == PARAMETERS + sum(one.allocated) + (96 + 534) * MIB
        assert one.outside_at_most == (96 + 534 + 516) * MIB


def test_outputs_that_are_kept_stay_until_their_backwards() -> None:
    """GPipe on the first of two ranks: one output for each microbatch, and none where they go when they were sent."""
    spec = PlanSpec("gpipe", 2, 1, 8)
    kept, given_back = (memory_of(spec, deallocate)[0].allocated for deallocate in (False, True))
    assert kept.outputs == 8 * MESSAGE
    assert given_back.outputs <= 2 * MESSAGE
    assert kept.activations == given_back.activations == 8 * 2 * MESSAGE
    assert kept.kept_back == 0


def test_host_memory_is_what_is_offloaded() -> None:
    for one in memory_of(PlanSpec("gpipe", 2, 1, 8, offload_chunks=1)):
        assert one.host > 0
        assert one.pinned == 2 * one.host
        assert one.total == one.parameters + sum(one.allocated) + (96 + 534) * MIB


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if family.search is None])
def test_the_memory_parts_add_up_to_the_peak(name: str, forward_only: bool) -> None:
    family = SCHEDULES[name]
    slices = 2 if family.sliced else 1
    chunks = family.chunks or (2 if "interleaved" in name else 1)
    plan = build_plan(PlanSpec(name, 2, chunks, 8, forward_only=forward_only, slices=slices))
    shape = replace(SHAPE, recompute=SELECTIVE, vocab_size=32)
    for rank, deallocate in product(range(2), (True, False)):
        memory = rank_memory(plan, rank, shape, deallocate)
        held = device_memory(plan, rank, memory, None)
        assert held.total == pytest.approx(memory.peak)
        assert min(held.allocated) >= 0


# By rank: communicators, peers received from, and peers sent to, over all of them.
LINE = [(2, 1, 1), (4, 2, 2), (4, 2, 2), (2, 1, 1)]
COMMUNICATORS = {
    "a line": ("1f1b", 4, 1, OVERLAP, "one_way", 8, LINE),
    "a line, single operations": ("1f1b", 4, 1, PLAIN, "one_way", 8, LINE),
    "a loop wraps around": ("interleaved_1f1b", 4, 2, OVERLAP, "one_way", 8, [(4, 2, 2)] * 4),
    "a loop of two, whose neighbours are one rank": ("interleaved_1f1b", 2, 2, OVERLAP, "one_way", 8, [(4, 2, 2)] * 2),
    "a V turns": ("zb_v", 4, 2, OVERLAP, "one_way", 8, [(4, 2, 2), (8, 4, 4), (8, 4, 4), (4, 2, 2)]),
    "batches": ("interleaved_1f1b", 4, 2, BATCHED, "one_way", 32, [(1, 2, 2)] * 4),
    "batches of two ranks": ("interleaved_1f1b", 2, 2, BATCHED, "shared", 32, [(1, 1, 1)] * 2),
    "a group for all": ("zb_v", 4, 2, PLAIN, "shared", 32, [(1, 1, 1), (2, 2, 2), (2, 2, 2), (1, 1, 1)]),
    "one rank": ("1f1b", 1, 1, OVERLAP, "one_way", 8, [()]),
}


@pytest.mark.parametrize("case", COMMUNICATORS)
def test_communicators_by_hand(case: str) -> None:
    name, size, chunks, policy, channels, limit, expected = COMMUNICATORS[case]
    placement = build_plan(PlanSpec(name, size, chunks, 4 * size, policy=policy, channels=channels)).placement
    for outside, most in ((Outside(), limit), (Outside(max_ctas=3), 3)):
        made = [list(outside.communicators(placement, rank, policy, channels)) for rank in range(size)]
        assert [tuple((one.count, one.receiving, one.sending) for one in rank) for rank in made] == [
            (numbers,) if numbers else () for numbers in expected
        ]
        assert all(one.channels == most for rank in made for one in rank)
        by_hand = [534 * MIB + most * (n[1] * 10 + n[2] * 2) * MIB if n else 534 * MIB for n in expected]
        assert list(outside.nbytes(placement, policy, channels)) == by_hand


def test_the_range_ends_at_the_one_measured_process_and_needs_a_gpu() -> None:
    """A rank of two with two chunks: 1,242 MiB were measured, 726 are the estimate."""
    spec = PlanSpec("interleaved_1f1b", 2, 2, 4)
    for one in memory_of(spec):
        assert (one.of_communicators + one.context, one.outside_at_most) == (726 * MIB, 1242 * MIB)
    plan = build_plan(spec)
    assert device_memory(plan, 0, rank_memory(plan, 0, SHAPE), None).outside_at_most == 0

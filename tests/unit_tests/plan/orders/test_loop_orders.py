"""Compute orders of GPipe, 1F1B, interleaved 1F1B and breadth-first: against cases written by hand, and against
Megatron's rules."""

from __future__ import annotations

import re

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, Instruction, format_program, instruction
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.lower.clock import run_clock
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Shape
from megatron_pp.plan.orders.interleaved import warmup_forwards

Order = list[Instruction]


def orders(schedule: str, pipeline_size: int, num_chunks: int, num_microbatches: int, group: int = 0) -> list[Order]:
    group = min(group or pipeline_size, num_microbatches)
    return SCHEDULES[schedule].orders(Shape(pipeline_size, num_chunks, num_microbatches, group))


def placed_orders(orders: list[Order], placement: Placement) -> list[tuple[Instruction, ...]]:
    return [placement.place(rank, order) for rank, order in enumerate(orders)]


# (schedule, P, V, M, group): the programs of the ranks
BY_HAND = {
    ("gpipe", 2, 1, 3, 0): ["F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"] * 2,
    ("1f1b", 3, 1, 4, 0): [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3",
    ],
    ("1f1b", 4, 1, 2, 0): [*["F0.0 F0.1 B0.0 B0.1"] * 3, "F0.0 B0.0 F0.1 B0.1"],
    # Warm-up on rank 0: 2 + 3 = 5 forwards; on rank 1: 3.
    ("interleaved_1f1b", 2, 2, 6, 3): [
        "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 F0.3 B1.1 F0.4 B1.2 F0.5 B0.0 F1.3 B0.1 F1.4 B0.2 F1.5 B1.3 B1.4 B1.5 "
        "B0.3 B0.4 B0.5",
        "F0.0 F0.1 F0.2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2 F1.3 B1.3 F1.4 B1.4 F1.5 B1.5 "
        "B0.3 B0.4 B0.5",
    ],
    # The last group has one microbatch: F1.2 waits for rank 1's F0.2, and backwards that can run meanwhile go first.
    ("interleaved_1f1b", 2, 2, 3, 0): [
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 B1.1 F1.2 B0.0 B0.1 B1.2 B0.2",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F1.2 B0.1 B1.2 B0.2",
    ],
    ("breadth_first", 2, 2, 3, 0): ["F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 B0.0 B0.1 B0.2"] * 2,
}


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_loop_orders_equal_those_written_by_hand(case: tuple[str, int, int, int, int]) -> None:
    assert [format_program(order) for order in orders(*case)] == BY_HAND[case]


@pytest.mark.parametrize(
    ("shape", "warmups"),
    [
        (Shape(4, 2, 8, 4), [10, 8, 6, 4]),  # 2 (P-1-r) + (V-1) G
        (Shape(4, 2, 12, 6), [12, 10, 8, 6]),  # a group larger than P adds to every rank
        (Shape(4, 2, 4, 4), [8, 8, 6, 4]),  # never more than there are: V M = 8
    ],
)
def test_warmup_forwards_of_each_rank(shape: Shape, warmups: list[int]) -> None:
    assert [warmup_forwards(shape, rank) for rank in range(shape.pipeline_size)] == warmups


def megatrons_order(shape: Shape, rank: int) -> Order:
    """Megatron's loop in three lines: warm-up forwards, then forward and backward k in turn, then what is left."""
    table = [
        (mb, chunk)
        for start in range(0, shape.num_microbatches, shape.group_size)
        for chunk in range(shape.num_chunks)
        for mb in range(shape.num_microbatches)
        if start <= mb < start + shape.group_size
    ]
    total = len(table)
    warmup = min(total, (shape.pipeline_size - rank - 1) * 2 + (shape.num_chunks - 1) * shape.group_size)
    order = []
    for k in range(total + warmup):
        if k < total:
            order.append(instruction(FORWARD, table[k][1], table[k][0]))
        if k >= warmup:
            mb, chunk = table[k - warmup]
            order.append(instruction(BACKWARD, shape.num_chunks - 1 - chunk, mb))
    return order


@pytest.mark.parametrize("extra", [0, 1, 2, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("pipeline_size", [1, 2, 3, 4])
def test_interleaved_is_megatrons_order_wherever_megatron_has_one(
    pipeline_size: int, num_chunks: int, extra: int
) -> None:
    group, compared = pipeline_size + extra, 0
    for num_microbatches in range(group, 4 * group + 1):
        shape = Shape(pipeline_size, num_chunks, num_microbatches, group)
        ours = SCHEDULES["interleaved_1f1b"].orders(shape)
        theirs = [megatrons_order(shape, rank) for rank in range(pipeline_size)]
        if num_chunks == 1 or num_microbatches % group not in range(1, pipeline_size):  # no group has fewer than P
            assert ours == theirs
            compared += 1
            continue
        for mine, strict in zip(ours, theirs, strict=True):  # order among forwards and among backwards stays
            for kind in (FORWARD, BACKWARD):
                assert [op for op in mine if op.op == kind] == [op for op in strict if op.op == kind]
    assert compared


def test_the_circle_that_overtaking_breaks_is_real() -> None:
    """Without it, the strict alternation of a ragged shape waits in a circle."""
    shape = Shape(4, 3, 5, 4)
    placement = Placement(LOOP, 4, 3)
    strict = [megatrons_order(shape, rank) for rank in range(4)]
    stuck = (
        "rank 0 cannot run F2.4 (forward of chunk 2, microbatch 4): it needs F1.4 of rank 3, which is stuck before it, "
        "at backward of chunk 1, microbatch 0"
    )
    with pytest.raises(PlanError, match=re.escape(stuck)):
        run_clock(placed_orders(strict, placement), placement)
    run_clock(placed_orders(SCHEDULES["interleaved_1f1b"].orders(shape), placement), placement)

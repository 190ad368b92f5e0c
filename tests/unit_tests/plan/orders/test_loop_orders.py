"""Compute orders of GPipe, 1F1B, interleaved 1F1B and breadth-first: against cases written by hand, and against
Megatron's rules."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from megatron_pp.errors import PlanError
from megatron_pp.plan.builder import family_of
from megatron_pp.plan.ir.instruction import BACKWARD, FORWARD, Instruction, format_program, instruction
from megatron_pp.plan.ir.placement import LOOP, Placement
from megatron_pp.plan.ir.spec import PlanSpec
from megatron_pp.plan.lower.clock import run_clock
from megatron_pp.plan.orders import SCHEDULES
from megatron_pp.plan.orders.family import Shape
from megatron_pp.plan.orders.interleaved import has_short_group, schedule_table, warmup_forwards

Order = list[Instruction]


def orders(schedule: str, pipeline_size: int, num_chunks: int, num_microbatches: int, group: int = 0) -> list[Order]:
    group = min(group or pipeline_size, num_microbatches)
    return SCHEDULES[schedule].orders(Shape(pipeline_size, num_chunks, num_microbatches, group))


def placed_orders(orders: list[Order], placement: Placement) -> list[tuple[Instruction, ...]]:
    return [placement.place(rank, order) for rank, order in enumerate(orders)]


def lines(*args: int | str) -> list[str]:
    return [format_program(order) for order in orders(*args)]  # type: ignore[arg-type]


# -- written by hand --------------------------------------------------------------------------------------------------


def test_gpipe_by_hand() -> None:
    assert lines("gpipe", 2, 1, 3) == ["F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"] * 2


def test_1f1b_by_hand() -> None:
    assert lines("1f1b", 3, 1, 4) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3",
    ]


def test_1f1b_with_fewer_microbatches_than_ranks_by_hand() -> None:
    assert lines("1f1b", 4, 1, 2) == [
        "F0.0 F0.1 B0.0 B0.1",
        "F0.0 F0.1 B0.0 B0.1",
        "F0.0 F0.1 B0.0 B0.1",
        "F0.0 B0.0 F0.1 B0.1",
    ]


def test_interleaved_by_hand() -> None:
    """P=2, V=2, M=4, G=2. Warm-up on rank 0: 2 (2-1-0) + (2-1) 2 = 4 forwards; on rank 1: 2."""
    assert lines("interleaved_1f1b", 2, 2, 4) == [
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3",
    ]


def test_interleaved_with_groups_larger_than_the_pipeline_by_hand() -> None:
    """P=2, V=2, M=6, G=3. Warm-up on rank 0: 2 + 3 = 5 forwards; on rank 1: 3."""
    assert lines("interleaved_1f1b", 2, 2, 6, 3) == [
        "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 F0.3 B1.1 F0.4 B1.2 F0.5 B0.0 F1.3 B0.1 F1.4 B0.2 F1.5 B1.3 B1.4 B1.5 "
        "B0.3 B0.4 B0.5",
        "F0.0 F0.1 F0.2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2 F1.3 B1.3 F1.4 B1.4 F1.5 B1.5 "
        "B0.3 B0.4 B0.5",
    ]


def test_interleaved_with_a_short_last_group_by_hand() -> None:
    """P=2, V=2, M=3, G=2: the last group has one microbatch. On rank 0, F1.2 waits for rank 1's F0.2, and the backwards
    that can run meanwhile go first."""
    assert lines("interleaved_1f1b", 2, 2, 3) == [
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 B1.1 F1.2 B0.0 B0.1 B1.2 B0.2",
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F1.2 B0.1 B1.2 B0.2",
    ]


def test_breadth_first_by_hand() -> None:
    assert lines("breadth_first", 2, 2, 3) == ["F0.0 F0.1 F0.2 F1.0 F1.1 F1.2 B1.0 B1.1 B1.2 B0.0 B0.1 B0.2"] * 2


# -- Megatron's table and numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_microbatches", "num_chunks", "group", "microbatches", "chunks"),
    [
        # The example in Megatron's own comment: PP2 N3M5 VP2.
        (5, 2, 3, [0, 1, 2, 0, 1, 2, 3, 4, 3, 4], [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]),
        (4, 2, 2, [0, 1, 0, 1, 2, 3, 2, 3], [0, 0, 1, 1, 0, 0, 1, 1]),
        (3, 3, 3, [0, 1, 2, 0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1, 2, 2, 2]),
        (2, 2, 6, [0, 1, 0, 1], [0, 0, 1, 1]),
        (3, 1, 2, [0, 1, 2], [0, 0, 0]),
    ],
)
def test_the_table_is_megatrons(
    num_microbatches: int, num_chunks: int, group: int, microbatches: list[int], chunks: list[int]
) -> None:
    table = schedule_table(num_microbatches, num_chunks, group)
    assert [m for m, _ in table] == microbatches
    assert [c for _, c in table] == chunks


@pytest.mark.parametrize(
    ("pipeline_size", "num_chunks", "num_microbatches", "group", "warmups"),
    [
        (4, 2, 8, 4, [10, 8, 6, 4]),  # 2 (P-1-r) + (V-1) G
        (4, 2, 12, 6, [12, 10, 8, 6]),  # a group larger than P adds to every rank
        (2, 4, 8, 2, [8, 6]),
        (4, 2, 4, 4, [8, 8, 6, 4]),  # never more than there are: V M = 8
        (1, 3, 5, 1, [2]),
    ],
)
def test_warmup_numbers(
    pipeline_size: int, num_chunks: int, num_microbatches: int, group: int, warmups: list[int]
) -> None:
    shape = Shape(pipeline_size, num_chunks, num_microbatches, group)
    assert [warmup_forwards(shape, rank) for rank in range(pipeline_size)] == warmups


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
@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("pipeline_size", [1, 2, 3, 4])
def test_interleaved_is_megatrons_order_wherever_megatron_has_one(
    pipeline_size: int, num_chunks: int, extra: int
) -> None:
    group, compared = pipeline_size + extra, 0
    for num_microbatches in range(group, 4 * group + 1):
        shape = Shape(pipeline_size, num_chunks, num_microbatches, group)
        ours = SCHEDULES["interleaved_1f1b"].orders(shape)
        theirs = [megatrons_order(shape, rank) for rank in range(pipeline_size)]
        if not has_short_group(shape):
            assert ours == theirs
            compared += 1
            continue
        for mine, strict in zip(ours, theirs, strict=True):  # order among forwards and among backwards stays
            for kind in (FORWARD, BACKWARD):
                assert [op for op in mine if op.op == kind] == [op for op in strict if op.op == kind]
    assert compared


# -- what holds for every shape ---------------------------------------------------------------------------------------

SHAPES = [
    (p, v, m, g)
    for p in (1, 2, 3, 4)
    for v in (1, 2, 3, 4)
    for m in sorted({1, max(1, p - 1), p, 2 * p, 2 * p + 1, 3 * p + 2})
    for g in {min(g, m) for g in ((p, p + 1, 2 * p) if v > 1 else (p,))}
]
FAMILIES = ["gpipe", "1f1b", "interleaved_1f1b", "breadth_first"]


@pytest.mark.parametrize("schedule", FAMILIES)
def test_every_operation_once_and_runnable(schedule: str) -> None:
    for p, v, m, g in SHAPES:
        if SCHEDULES[schedule].chunks not in (None, v):
            continue
        placement = Placement(LOOP, p, v)
        all_orders = SCHEDULES[schedule].orders(Shape(p, v, m, g))
        wanted = Counter(instruction(op, c, mb) for op in (FORWARD, BACKWARD) for c in range(v) for mb in range(m))
        assert len(all_orders) == p
        for order in all_orders:
            assert Counter(order) == wanted
            assert all(
                order.index(instruction(FORWARD, at.chunk, at.mb)) < i for i, at in enumerate(order) if at.op == "B"
            )
        run_clock(placed_orders(all_orders, placement), placement)  # raises where the ranks would wait in a circle


@pytest.mark.parametrize("schedule", FAMILIES)
def test_gradients_are_added_up_in_microbatch_order(schedule: str) -> None:
    """What makes gradients equal to the last bit: per chunk, backwards run in the order of the microbatches."""
    for p, v, m, g in SHAPES:
        if SCHEDULES[schedule].chunks not in (None, v):
            continue
        for order in SCHEDULES[schedule].orders(Shape(p, v, m, g)):
            for kind in (FORWARD, BACKWARD):
                for chunk in range(v):
                    assert [op.mb for op in order if op.op == kind and op.chunk == chunk] == list(range(m))


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 9])
@pytest.mark.parametrize("pipeline_size", [1, 2, 3, 4, 8])
def test_1f1b_holds_at_most_p_minus_r_microbatches(pipeline_size: int, num_microbatches: int) -> None:
    for rank, order in enumerate(orders("1f1b", pipeline_size, 1, num_microbatches)):
        held = peak = 0
        for op in order:
            held += 1 if op.op == FORWARD else -1
            peak = max(peak, held)
        assert peak == min(pipeline_size - rank, num_microbatches)


def test_a_single_chunk_interleaved_is_1f1b_with_twice_the_warmup() -> None:
    """Megatron's number for V=1: 2 (P-1-r) forwards, not P-1-r."""
    kinds = ["".join(op.op for op in order) for order in orders("interleaved_1f1b", 2, 1, 4)]
    assert kinds == ["FFFBFBBB", "FBFBFBFB"]


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


def test_unknown_schedules_and_wrong_numbers_of_chunks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"schedule '2f2b' is not known; it is one of gpipe, 1f1b, "):
        family_of(PlanSpec("2f2b", 2, 1, 4))
    with pytest.raises(PlanError, match=r"schedule 1f1b has 1 model chunk\(s\) a rank, not 2"):
        family_of(PlanSpec("1f1b", 2, 2, 4))

"""Plan mutants: one instruction of one rank's program is dropped, duplicated, swapped or moved. In a batch it is one of
the members.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from megatron_pp.plan import builder
from megatron_pp.plan.ir.instruction import BATCH, Instruction, batch
from megatron_pp.plan.ir.repeated import Block
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.lower.repetition import block_at

Program = tuple[Instruction, ...]
KINDS = ("drop", "duplicate", "swap", "move")


def mutants(
    plan: Plan,
    rng: random.Random | None = None,
    per_instruction: int = 2,
    ranks: Collection[int] | None = None,
) -> Iterator[tuple[str, Plan]]:
    """(description, mutated plan) of each mutant, once. Mutants are of the programs of ``ranks``, or of all.

    Every instruction is dropped. ``rng`` draws ``per_instruction`` places for a duplicate and as many targets of a
    move, always with the neighbouring one. It draws one partner less for a swap, from all places (a swap of neighbours
    is a move). Without ``rng`` all are tried.
    """
    for rank in range(len(plan.programs)) if ranks is None else ranks:
        program = plan.programs[rank]
        seen = {program}
        for kind, what, mutated in _program_mutants(program, rng, per_instruction):
            if mutated not in seen:
                seen.add(mutated)
                programs = (*plan.programs[:rank], mutated, *plan.programs[rank + 1 :])
                yield f"{kind}: rank {rank}, {what}", replace(plan, programs=programs)


def steady_block(plan: Plan, period: int) -> Block:
    """The block of the plan's programs that repeats in the steady state. Raises IndexError if backwards are missing."""
    place = builder._steady_place(plan.spec, period)
    assert place is not None
    return block_at(place, plan.spec, period, plan.programs)


def _program_mutants(program: Program, rng: random.Random | None, most: int) -> Iterator[tuple[str, str, Program]]:
    for i, at in enumerate(program):
        for kind, what, items in _edits(list(program), i, rng, most):
            yield kind, f"{what} (position {i})", tuple(items)
        if at.op == BATCH:
            for kind, what, members in _edits(list(at.members), 0, rng, most, all_positions=True):
                inside = (batch(members),) if members else ()
                yield kind, f"{what} inside {at} (position {i})", (*program[:i], *inside, *program[i + 1 :])
            yield from _taken_out(program, i, rng, most)


def _edits(
    items: list[Instruction], i: int, rng: random.Random | None, most: int, all_positions: bool = False
) -> Iterator[tuple[str, str, list[Instruction]]]:
    """The edits of the item at ``i``, or with ``all_positions`` of every item."""
    for k in range(len(items)) if all_positions else (i,):
        at = items[k]
        without = items[:k] + items[k + 1 :]
        yield "drop", str(at), without
        for j in _places(len(items) + 1, k, rng, most):
            yield "duplicate", f"{at} again at {j}", [*items[:j], at, *items[j:]]
        for j in range(len(items)) if rng is None else rng.sample(range(len(items)), min(most - 1, len(items))):
            swapped = list(items)
            swapped[k], swapped[j] = swapped[j], swapped[k]
            yield "swap", f"{at} with {items[j]}", swapped
        for j in _places(len(items), k, rng, most):
            yield "move", f"{at} to {j}", [*without[:j], at, *without[j:]]


def _taken_out(program: Program, i: int, rng: random.Random | None, most: int) -> Iterator[tuple[str, str, Program]]:
    """The programs in which a member of the batch at ``i`` is posted alone, elsewhere."""
    members = program[i].members
    for k, member in enumerate(members):
        others = members[:k] + members[k + 1 :]
        rest = (*program[:i], *((batch(others),) if others else ()), *program[i + 1 :])
        for j in _places(len(rest) + 1, i, rng, most):
            yield "move", f"{member} out of {program[i]} to {j}", (*rest[:j], member, *rest[j:])


def _places(count: int, near: int, rng: random.Random | None, most: int) -> Sequence[int]:
    """Indices below ``count``: all, or ``most`` of them, with ``near`` first."""
    if rng is None or count <= most:
        return range(count)
    first = min(near, count - 1)
    return [first, *rng.sample([k for k in range(count) if k != first], most - 1)]

"""Programs whose steady state is repeated, which make a plan for more microbatches from a plan for fewer.

A *block* is a stretch of every rank's program. After it the pipeline is in the same state as before it, with a few
microbatches more done. ``verify`` proves this for each block (docs/proofs.md, "A new number of microbatches").
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, overload

from megatron_pp.errors import PlanError
from megatron_pp.plan.ir.instruction import Instruction, later
from megatron_pp.plan.ir.tasks import Task

Line = tuple[Instruction, ...]


class RepetitionError(PlanError):
    """A block cannot be repeated, because it does not leave the pipeline in the state in which it found it."""


class Block(NamedTuple):
    """Instructions ``starts[r]`` up to ``ends[r]`` of each rank r. A copy is later by ``microbatches``."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    microbatches: int

    def of(self, rank: int) -> tuple[int, int]:
        return self.starts[rank], self.ends[rank]


class Lines(Sequence[Line]):
    """One line of instructions per rank, made on first use and kept. Equal to a tuple of the same lines."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._made: dict[int, Line] = {}

    @abstractmethod
    def _make(self, rank: int) -> Line:
        """The line of ``rank``."""

    def forget(self) -> None:
        """Drop the lines made so far."""
        self._made.clear()

    def __len__(self) -> int:
        return self._ranks

    @overload
    def __getitem__(self, rank: int) -> Line: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[Line, ...]: ...
    def __getitem__(self, rank: int | slice) -> Line | tuple[Line, ...]:
        ranks = range(self._ranks)[rank]
        if isinstance(ranks, range):
            return tuple(self[one] for one in ranks)
        if ranks not in self._made:
            self._made[ranks] = self._make(ranks)
        return self._made[ranks]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class Repeating(NamedTuple):
    """Programs with one of their blocks, and their tasks by rank and number of the copy."""

    programs: Sequence[Line]
    block: Block
    made: dict[tuple[int, int], tuple[Task, ...]]

    def tasks(self, rank: int, copy: int) -> tuple[Task, ...]:
        """The tasks of a copy, made once. Copy 0 is the program up to the block's end, copy k the k-th repetition."""
        found = self.made.get((rank, copy))
        if found is None:
            start, end = self.block.of(rank)
            part = self.programs[rank][start if copy else 0 : end]
            found = self.made[(rank, copy)] = _tasks(part, copy * self.block.microbatches)
        return found


class Repeated(Lines):
    """The programs of ``repeating`` with the block repeated ``times`` more times."""

    def __init__(self, repeating: Repeating, times: int) -> None:
        super().__init__(len(repeating.programs))
        self.repeating = repeating
        self.times = times

    def tasks(self, rank: int) -> tuple[Task, ...]:
        """``rank``'s program for the engine."""
        programs, block, _ = self.repeating
        copies = (self.repeating.tasks(rank, copy) for copy in range(self.times + 1))
        rest = _tasks(programs[rank][block.ends[rank] :], self.times * block.microbatches)
        return (*chain.from_iterable(copies), *rest)

    def _make(self, rank: int) -> Line:
        programs, block, _ = self.repeating
        program, (start, end), step = programs[rank], block.of(rank), block.microbatches
        copies = [later(at, step * k) for k in range(1, self.times + 1) for at in program[start:end]]
        rest = [later(at, step * self.times) for at in program[end:]]
        return (*program[:end], *copies, *rest)


def _tasks(part: Iterable[Instruction], microbatches: int) -> tuple[Task, ...]:
    return tuple([Task(at, microbatches) for at in part])

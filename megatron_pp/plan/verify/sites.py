"""A rank's program by *site*: the instructions of one op, stage, peer, chunk, slice and tensor.

Where each microbatch stands once at each site, what a rule says of two instructions of one microbatch is a comparison
of two lists of positions, in a tenth of the time that it takes instruction by instruction. ``lifetime.py`` and
``rank_queues.py`` do so where they can.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, chain, compress, count
from operator import gt, itemgetter, lt
from typing import NamedTuple

from megatron_pp.plan.ir.instruction import BATCH, POST_OPS, Instruction, each

_FIELDS = itemgetter(*map(Instruction._fields.index, ("op", "stage", "peer", "chunk", "slice", "tensor")))
_MICROBATCH = itemgetter(Instruction._fields.index("mb"))
_MEMBERS = itemgetter(Instruction._fields.index("members"))


class Site(NamedTuple):
    """Where its instructions stand in the program, ascending, the microbatch of each, and the first of them, ``at``."""

    at: Instruction
    positions: list[int]
    microbatches: list[int]

    def before(self, position: int) -> list[int]:
        """The microbatches of those that stand before ``position``, ascending."""
        return sorted(self.microbatches[: bisect_left(self.positions, position)])

    def in_order(self) -> list[int]:
        """The positions, by microbatch."""
        return [position for _, position in sorted(zip(self.microbatches, self.positions, strict=True))]


def sites_of(program: Sequence[Instruction]) -> list[Site]:
    """In the order in which they first come up."""
    found: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for position, fields in enumerate(map(_FIELDS, program)):
        found[fields].append(position)
    microbatches = list(map(_MICROBATCH, program))
    return [Site(program[at[0]], at, [microbatches[k] for k in at]) for at in found.values()]


class RankSites:
    """The sites of ``program`` with the members of its groups one by one, which is ``line``. ``index``: where in that
    each entry begins, and the end; ``batches``: where each batch stands in it.
    """

    def __init__(self, program: Sequence[Instruction]) -> None:
        self.program = self.line = program
        self.index: Sequence[int] = range(len(program) + 1)
        self.batches: list[range] = []
        self.grouped = any(map(_MEMBERS, program))
        if self.grouped:
            self.line = tuple(each(program))
            self.index = (0, *accumulate(len(at.members) or 1 for at in program))
            of = zip(program, self.index, self.index[1:], strict=False)
            self.batches = [range(start, end) for at, start, end in of if at.op == BATCH]
        self.sites = sites_of(self.line)

    def entries(self, ops: Collection[str]) -> list[int]:
        """Where entries of these ops stand in the program, ascending."""
        if self.grouped:
            return [k for k, at in enumerate(self.program) if at.op in ops]
        return positions_of(ops, self.sites)

    @cached_property
    def batches_post(self) -> bool:
        """Whether batches hold posts alone."""
        return all(self.line[k].op in POST_OPS for batch in self.batches for k in batch)


def positions_of(ops: Collection[str], sites: Iterable[Site]) -> list[int]:
    """Where instructions of these ops stand, ascending."""
    return sorted(chain.from_iterable(site.positions for site in sites if site.at.op in ops))


def are_before(first: Sequence[int], then: Sequence[int]) -> bool:
    """Whether each of ``first`` is below its counterpart."""
    return len(first) == len(then) and all(map(lt, first, then))


def peak(changes: Iterable[tuple[list[int], int]]) -> int:
    """The most that a count comes to, which starts at 0 and changes by so much at each of these positions."""
    up: list[int] = []
    down: list[int] = []
    for positions, difference in changes:
        (up if difference > 0 else down).extend(positions * abs(difference))
    up.sort()
    down.sort()
    # Right before the k-th time that it falls; most of that is found at a few of them.
    most, k = max([0, len(up) - len(down), *(bisect_left(up, down[k]) - k for k in range(0, len(down), 16))]), 0
    while (k := next(compress(count(k), map(gt, down[k:], up[k + most :])), -1)) >= 0:
        most = bisect_left(up, down[k]) - k
    return most

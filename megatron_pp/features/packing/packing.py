"""Packs sequences into microbatches, chooses the number of context-parallel ranks for each, and counts their costs.

All pipelines (data- times context-parallel ranks) have the same number of microbatches in a step. A *slot* is one
microbatch of all of them. It consists of packs; neighbouring ranks share the sequences of a pack. All pipelines run the
slots in one order under one plan. So the collectives of any two packs come in the same order on all of their ranks.
This module never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_pp.errors import PlanError
from megatron_pp.plan.costs.attention import attention_share


def pair_cost(hidden_size: int, ffn_hidden_size: int) -> float:
    """The cost that each earlier token adds to a token under causal attention, in units of the token's linear layers. A
    sequence of n tokens costs n + pair_cost n^2 (``attention_share``)."""
    share = attention_share(1, hidden_size, ffn_hidden_size)
    return share / (1 - share)


@dataclass(frozen=True)
class PackingRules:
    """The rules by which sequences are packed.

    ranks        number of pipelines, which is data- times context-parallel ranks; a power of two
    rank_tokens  the most tokens of one microbatch that a rank holds. Its memory is then that of microbatches of this
                 length, in whatever order they run. A longer sequence gets as many ranks as it needs, a power of two,
                 as in Megatron's hybrid context parallelism
    pair         ``pair_cost`` of the model's layers; with 0 only the number of tokens counts

    Raises PlanError for other numbers."""

    ranks: int
    rank_tokens: int
    pair: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks & (self.ranks - 1):
            raise PlanError(f"sequences are packed for {self.ranks} ranks; it must be a power of two")
        if self.rank_tokens < 1:
            raise PlanError(f"rank_tokens is {self.rank_tokens}; it must be at least 1")
        if not (math.isfinite(self.pair) and self.pair >= 0):
            raise PlanError(f"the cost of a pair of tokens is {self.pair}; it must be finite and at least 0")

    def cost(self, lengths: Sequence[int], context: int = 1) -> float:
        """The cost for each of ``context`` ranks of packed sequences of these lengths, in tokens of linear layers."""
        return sum(length + self.pair * length**2 for length in lengths) / context

    def context(self, length: int) -> int:
        """The number of ranks that a sequence needs. Raises PlanError if there are too few."""
        needed = 1 << (-(-length // self.rank_tokens) - 1).bit_length()
        if needed > self.ranks:
            raise PlanError(
                f"a sequence of {length} tokens needs {needed} ranks of {self.rank_tokens}; there are {self.ranks}"
            )
        return needed


@dataclass(frozen=True)
class Pack:
    """Sequences of one microbatch on neighbouring ranks, each of which holds a share of every sequence.

    sequences  places of the sequences in the step's list
    lengths    numbers of their tokens
    ranks      the ranks that share them, in order
    cost       cost for each of these ranks"""

    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    ranks: range
    cost: float

    @property
    def context(self) -> int:
        """The number of context-parallel ranks."""
        return len(self.ranks)

    @property
    def tokens(self) -> int:
        """The number of tokens on all its ranks together."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Slot:
    """One microbatch of all pipelines. ``packs`` are in the order of their ranks; each rank is in one of them."""

    packs: tuple[Pack, ...]

    @property
    def cost(self) -> float:
        """The cost of the slowest rank, because pipelines wait for each other at the step's end, and before it when
        they exchange experts' tokens or gradients."""
        return max(pack.cost for pack in self.packs)

    def of_rank(self, rank: int) -> Pack:
        return next(pack for pack in self.packs if rank in pack.ranks)


@dataclass(frozen=True)
class PackedStep:
    """``slots`` in the order in which they run."""

    slots: tuple[Slot, ...]

    @property
    def costs(self) -> tuple[float, ...]:
        return tuple(slot.cost for slot in self.slots)

    @property
    def tokens(self) -> int:
        return sum(pack.tokens for slot in self.slots for pack in slot.packs)

    def of_rank(self, rank: int) -> tuple[Pack, ...]:
        """The microbatches of one pipeline."""
        return tuple(slot.of_rank(rank) for slot in self.slots)

    def ordered(self, order: Sequence[int]) -> PackedStep:
        """The step with slot ``order[k]`` as its k-th. Raises PlanError if ``order`` is not an order of the slots."""
        if sorted(order) != list(range(len(self.slots))):
            raise PlanError(f"{list(order)} is no order of {len(self.slots)} microbatches: each comes once in it")
        return PackedStep(tuple(self.slots[k] for k in order))


def packed(lengths: Sequence[int], rules: PackingRules) -> PackedStep:
    """The step's sequences in as few slots as they need, with costs that are as equal as possible over the ranks.

    Sequences are placed one after the other, the costliest first: where the slot does not become longer, or else on the
    ranks with the least work. Ranks that are left over share the costliest pack of their slot. The result depends only
    on the arguments, so all ranks find the same. Raises PlanError for lengths below 1 and for sequences that do not
    fit.
    """
    if not lengths or any(length < 1 for length in lengths):
        raise PlanError("a step has at least one sequence, each of at least 1 token")
    wanted = sorted(range(len(lengths)), key=lambda k: (-lengths[k], k))
    room = rules.ranks * rules.rank_tokens
    alone = sum(context for k in wanted if (context := rules.context(lengths[k])) > 1)
    count = max(1, -(-sum(lengths) // room), -(-alone // rules.ranks))
    while (slots := _placed(lengths, wanted, rules, count)) is None:
        count += 1
    return PackedStep(tuple(slot.finished(lengths, rules) for slot in slots if slot.bins))


@dataclass
class _Bin:
    """A pack that is being filled."""

    context: int
    sequences: list[int] = field(default_factory=list)
    tokens: int = 0
    work: float = 0.0  # of all its ranks together

    @property
    def cost(self) -> float:
        return self.work / self.context


@dataclass
class _Slot:
    bins: list[_Bin]
    free: int

    @property
    def cost(self) -> float:
        return max((one.cost for one in self.bins), default=0.0)

    def finished(self, lengths: Sequence[int], rules: PackingRules) -> Slot:
        """The slot, in which every rank has a pack. Ranks that are left over go to the costliest pack whose ranks can
        be doubled. The smallest pack can always be doubled, because all numbers of ranks are powers of two."""
        while self.free:
            widened = max((one for one in self.bins if one.context <= self.free), key=lambda one: one.cost)
            self.free -= widened.context
            widened.context *= 2
        packs = []
        first = 0
        for one in sorted(self.bins, key=lambda one: (-one.context, one.sequences)):
            ranks = range(first, first + one.context)
            own = tuple(lengths[k] for k in one.sequences)
            packs.append(Pack(tuple(one.sequences), own, ranks, rules.cost(own, one.context)))
            first += one.context
        return Slot(tuple(packs))


def _placed(lengths: Sequence[int], wanted: Sequence[int], rules: PackingRules, count: int) -> list[_Slot] | None:
    """The sequences in ``count`` slots; None if they do not fit."""
    slots = [_Slot([], rules.ranks) for _ in range(count)]
    for k in wanted:
        length = lengths[k]
        context = rules.context(lengths[k])
        work = rules.cost([length])
        best: tuple[tuple[float, float], _Slot, _Bin] | None = None
        for slot in slots:
            bins = [one for one in slot.bins if one.context == context]
            if slot.free >= context:
                bins.append(_Bin(context))
            for one in bins:
                if one.tokens + length > one.context * rules.rank_tokens:
                    continue
                cost = (one.work + work) / one.context
                longer = max(0.0, cost - slot.cost)
                if best is None or (longer, cost) < best[0]:
                    best = (longer, cost), slot, one
        if best is None:
            return None
        _, slot, chosen = best
        if not chosen.sequences:
            slot.bins.append(chosen)
            slot.free -= context
        chosen.sequences.append(k)
        chosen.tokens += length
        chosen.work += work
    return slots

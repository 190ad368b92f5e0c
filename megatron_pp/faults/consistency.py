"""Checks that all ranks enter a step with the same plan, matching shapes and the same ``config.step_number``.

Ranks that enter with a new plan compare descriptions of it. What they agree on is kept under a number. If they return
to a plan they do not compare it again, but only check that all have returned to the same. Every rank takes part in each
agreement, in the same step, so a number means the same on all ranks. A rank publishes the numbers that it used as a
*history* ``(upto, digest, step, number, step, number, ...)``: the last changes in order, complete up to step ``upto``,
and a digest of all changes before them.

The nth call of one rank always meets the nth call of the others, because messages have no other order. So a rank that
calls a step once too often is detected only by the program's own number, which then differs from that of other ranks.
The change of the number is a part of what ranks agree on. This costs nothing, as it is the same in almost every call.
"""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from megatron_pp.common.bounded_cache import BoundedCache
from megatron_pp.faults.store.records import ENTERING, Entry, Progress

MOVE = "step_number"
"""In a description: how the number changed; compared."""
NUMBER = "the number itself"
"""In a description: shown, but not compared, as the changes determine it."""
SENDS = "shape sent towards the last stage"
RECEIVES = "shape received from the stage before"
LAYERS = "the order of the layers"
_DIFFERING = frozenset({SENDS, RECEIVES, LAYERS})  # fields that may differ between ranks that agree

_BUDGET = 4 << 20  # bytes; all ranks evict the same agreements, as they use the same ones and count sizes alike
_MIN_BYTES = _BUDGET // 64  # each agreement counts at least this much, so at most 64 are kept
_BYTES_PER_RANK = 512  # for values that differ by rank
_CHANGES = 32  # changes that a history lists
_DIGESTS = 2**61 - 1  # a prime


class _Agreed(NamedTuple):
    """An agreement: ``common``, the values of all ranks; and ``own``, the values that differ, by rank."""

    key: Hashable
    common: dict[str, str]
    own: dict[int, dict[str, str]]


class Agreements:
    """The agreements of one rank with the others; ``ranks`` is their number."""

    def __init__(self, ranks: int = 1) -> None:
        self._made = 0
        self._bytes = ranks * _BYTES_PER_RANK
        self._kept: BoundedCache[int, _Agreed] = BoundedCache(_BUDGET)

    def use(self, key: Hashable) -> int:
        """The number of the agreement on ``key``; 0 if there is none."""
        found = next((number for number, agreed in self._kept.entries.items() if agreed.key == key), 0)
        self._kept.get(found)
        return found

    def add(self, key: Hashable, descriptions: Mapping[int, Mapping[str, str]]) -> int:
        """Add an agreement; returns its number, from 1. ``descriptions``: what each rank entered with."""
        self._made += 1
        one = next(iter(descriptions.values()), {})
        common = {name: value for name, value in one.items() if name not in _DIFFERING}
        own = {rank: {n: v for n, v in each.items() if n in _DIFFERING} for rank, each in descriptions.items()}
        size = self._bytes + sum(len(name) + len(value) for name, value in common.items())
        self._kept.put(self._made, _Agreed(key, common, own), max(size, _MIN_BYTES))
        return self._made

    def description(self, number: int, rank: int) -> Mapping[str, str] | None:
        """The description with which ``rank`` entered agreement ``number``; None if it is no longer kept."""
        agreed = self._kept.entries.get(number)
        return None if agreed is None or rank not in agreed.own else {**agreed.common, **agreed.own[rank]}


def changed(changes: tuple[int, ...], step: int, number: int) -> tuple[int, ...]:
    """``changes`` (digest, step, number, ...; empty at first) with one more; the oldest go into the digest."""
    listed = [*(changes or (0,)), step, number]
    digest = listed.pop(0)
    while len(listed) > 2 * _CHANGES:
        digest = digest_with(digest, *listed[:2])
        del listed[:2]
    return (digest, *listed)


def may_differ(mine: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether two histories may show that ranks ran different plans: each has changes, and not the same ones."""
    return min(len(mine), len(theirs)) >= 4 and mine[1:] != theirs[1:]


def last_change(history: tuple[int, ...]) -> int:
    return history[-2] if len(history) > 3 else 0


def digest_with(digest: int, step: int, number: int) -> int:
    return (digest * 1_000_003 + step * 8_191 + number) % _DIGESTS


class StepNumber:
    """The program's number of the step in the last call of one rank."""

    def __init__(self) -> None:
        self._last: int | None = None

    def move(self, number: int) -> str:
        """The difference of ``number`` from that of the last call, in words."""
        before, self._last = self._last, number
        if before is None:
            return f"begins with {number}"
        return f"{number - before:+d} since its last step" if number != before else "as in its last step"


class Mismatch(NamedTuple):
    """A field that differs, and its values on two ranks."""

    field: str
    values: dict[int, str]

    def __str__(self) -> str:
        values = ", ".join(f"rank {rank} has {value}" for rank, value in sorted(self.values.items()))
        return f"the ranks of the pipeline do not agree on {self.field}: {values}"


def arrived(entries: Mapping[int, Entry], step: int) -> set[int]:
    """Ranks that have published an entry for ``step``, or for a later one, which they do only after all agreed."""
    return {rank for rank, entry in entries.items() if entry.step >= step}


def have_gone_on(entries: Mapping[int, Entry], progress: Mapping[int, Progress], step: int) -> bool:
    """Whether a rank is in ``step``, or has passed it, without an entry for it: it runs an earlier agreement."""
    return any(
        known.step >= step and known.state != ENTERING and rank in entries and entries[rank].step < step
        for rank, known in progress.items()
    )


def find_mismatch(own_rank: int, entries: Mapping[int, Entry], step: int) -> Mismatch | None:
    """Compare this rank's entry with those of all ranks that are known to have entered ``step``. Returns the lowest
    rank that differs, and the first field in which it does."""
    mine = entries.get(own_rank)
    if mine is None or mine.step < step:  # the records were read before this rank published its entry
        return None
    for rank, entry in sorted(entries.items()):
        if entry.step != step:  # the rank has passed this step, is not in it yet, or has not yet published its entry
            continue
        found = compare(own_rank, mine.description, rank, entry.description)
        if found is not None:
            return found
    return None


def compare(one: int, mine: Mapping[str, str], other: int, theirs: Mapping[str, str]) -> Mismatch | None:
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        if name == NUMBER or name in _DIFFERING:
            continue
        a, b = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if a != b:
            if name == MOVE:
                a, b = _with_number(a, mine.get(NUMBER)), _with_number(b, theirs.get(NUMBER))
            return Mismatch(name, {one: a, other: b})
    for source, target, sends, receives in ((one, other, mine, theirs), (other, one, theirs, mine)):
        sent, received = sends.get(SENDS), receives.get(RECEIVES)
        if target == source + 1 and sent != received:
            name = f"the shape of activations (sent by rank {source}, received by rank {target})"
            return Mismatch(name, {source: str(sent), target: str(received)})
    return None


def _with_number(move: str, number: str | None) -> str:
    if not move:
        return "none"
    return f"{number} ({move})" if number else move

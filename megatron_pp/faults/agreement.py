"""What the ranks of a pipeline have agreed on when they entered their steps: a plan that they come back to needs no new
comparison, only a check that all came back to the same.

Agreements are numbered as they are made. Every rank takes part in each, in the same step, so a number means the same on
all ranks. A rank publishes the numbers that it used as a *history* ``(upto, digest, step, number, step, number, ...)``:
the last changes in order, complete up to step ``upto``, and a digest of all changes before them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from megatron_pp.plan.bounded_cache import BoundedCache

SENDS = "shape sent towards the last stage"
RECEIVES = "shape received from the stage before"
_DIFFERING = frozenset({SENDS, RECEIVES})  # fields in which ranks that agree may differ

_BUDGET = 4 << 20  # bytes; all ranks evict the same agreements, as they use the same ones and count sizes alike
_MIN_BYTES = _BUDGET // 64  # of one agreement: no more than 64 are kept
_BYTES_PER_RANK = 512  # for what differs
_CHANGES = 32  # listed in a history
_DIGESTS = 2**61 - 1  # a prime


class _Agreed(NamedTuple):
    """``common`` to all ranks, and ``own``: what differs, by rank."""

    key: Hashable
    common: dict[str, str]
    own: dict[int, dict[str, str]]


class Difference(NamedTuple):
    """In ``step`` one rank used agreement ``mine``, the other ``theirs``; both 0 if all that is known is that they
    differed before ``step``."""

    step: int
    mine: int
    theirs: int


class Agreements:
    """What one of ``ranks`` ranks has agreed on with the others."""

    def __init__(self, ranks: int = 1) -> None:
        self._made = 0
        self._bytes = ranks * _BYTES_PER_RANK
        self._kept: BoundedCache[int, _Agreed] = BoundedCache(_BUDGET)

    def use(self, key: Hashable) -> int:
        """The number of the agreement on ``key``; 0 where there is none."""
        found = next((number for number, agreed in self._kept.entries.items() if agreed.key == key), 0)
        self._kept.get(found)
        return found

    def add(self, key: Hashable, descriptions: Mapping[int, Mapping[str, str]]) -> int:
        """A new agreement; its number, from 1. ``descriptions``: what each rank entered with."""
        self._made += 1
        one = next(iter(descriptions.values()), {})
        common = {name: value for name, value in one.items() if name not in _DIFFERING}
        own = {rank: {n: v for n, v in each.items() if n in _DIFFERING} for rank, each in descriptions.items()}
        size = self._bytes + sum(len(name) + len(value) for name, value in common.items())
        self._kept.put(self._made, _Agreed(key, common, own), max(size, _MIN_BYTES))
        return self._made

    def description(self, number: int, rank: int) -> Mapping[str, str] | None:
        """What ``rank`` entered with when agreement ``number`` was made; None if it is no longer kept."""
        agreed = self._kept.entries.get(number)
        return None if agreed is None or rank not in agreed.own else {**agreed.common, **agreed.own[rank]}


def changed(changes: tuple[int, ...], step: int, number: int) -> tuple[int, ...]:
    """``changes`` (digest, step, number, ...; empty at first) with one more; the oldest go into the digest."""
    listed = [*(changes or (0,)), step, number]
    digest = listed.pop(0)
    while len(listed) > 2 * _CHANGES:
        digest = _digest(digest, *listed[:2])
        del listed[:2]
    return (digest, *listed)


def in_force(history: tuple[int, ...], step: int) -> int:
    """The agreement that was used in ``step``; 0 if the history does not contain it."""
    if not history or step > history[0]:
        return 0
    return next((number for since, number in reversed(_pairs(history)) if since <= step), 0)


def last_change(history: tuple[int, ...]) -> int:
    """The step in which the agreement last changed."""
    return history[-2] if len(history) > 3 else 0


def difference(mine: tuple[int, ...], theirs: tuple[int, ...]) -> Difference | None:
    """The first step in which the two histories, as far as both are known, differ."""
    if len(mine) < 4 or len(theirs) < 4:
        return None
    start, upto = max(mine[2], theirs[2]), min(mine[0], theirs[0])
    for step in sorted({since for since, _ in _pairs(mine) + _pairs(theirs) if start <= since <= upto}):
        one, other = in_force(mine, step), in_force(theirs, step)
        if one != other:
            return Difference(step, one, other)
    before, before_theirs = _digests(mine), _digests(theirs)
    steps = [s for s, digest in before.items() if s <= upto and before_theirs.get(s, digest) != digest]
    return Difference(min(steps), 0, 0) if steps else None


def _digests(history: tuple[int, ...]) -> dict[int, int]:
    """For each change that is listed, a digest of all before it."""
    found, digest = {}, history[1]
    for step, number in _pairs(history):
        found[step] = digest
        digest = _digest(digest, step, number)
    return found


def _digest(digest: int, step: int, number: int) -> int:
    return (digest * 1_000_003 + step * 8_191 + number) % _DIGESTS


def _pairs(history: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(history[2::2], history[3::2], strict=False))

"""Finds ranks that returned to different plans: the first step in which their histories differ, and what differs."""

from collections.abc import Mapping
from typing import NamedTuple

from megatron_pp.faults.consistency import (
    NUMBER,
    RECEIVES,
    SENDS,
    Agreements,
    Mismatch,
    compare,
    digest_with,
    find_mismatch,
    last_change,
    may_differ,
)
from megatron_pp.faults.store.records import ENTERING, Entry, Progress


class Difference(NamedTuple):
    """In ``step`` one rank used agreement ``mine``, the other ``theirs``; both 0 if all that is known is that they
    differed before ``step``."""

    step: int
    mine: int
    theirs: int


def find_late_mismatch(
    own_rank: int, own: Progress, progress: Mapping[int, Progress], agreements: Agreements
) -> Mismatch | None:
    """The mismatch of ranks that returned to different agreements in one step. All ranks had agreed on each of these
    before, so none was compared on entry."""
    for rank, seen in sorted(progress.items()):
        first = difference(own.history, seen.history)
        if first is None:
            continue
        if not first.mine:
            return Mismatch(f"the plans of the steps before {first.step}", {own_rank: "one", rank: "another"})
        mine = agreements.description(first.mine, own_rank)
        theirs = agreements.description(first.theirs, rank)
        found = None
        if mine is not None and theirs is not None:
            mine = {**mine, NUMBER: number_in(own, first.step)}
            theirs = {**theirs, NUMBER: number_in(seen, first.step)}
            found = compare(own_rank, mine, rank, theirs)
        values = {own_rank: f"that of agreement {first.mine}", rank: f"that of agreement {first.theirs}"}
        return found or Mismatch(f"the plan of step {first.step}", values)
    return None


def difference(mine: tuple[int, ...], theirs: tuple[int, ...]) -> Difference | None:
    """The first step in which the two histories, as far as both are known, differ."""
    if not may_differ(mine, theirs):
        return None
    start = max(mine[2], theirs[2])
    upto = min(mine[0], theirs[0])
    for step in sorted({since for since, _ in pairs(mine) + pairs(theirs) if start <= since <= upto}):
        one = in_force(mine, step)
        other = in_force(theirs, step)
        if one != other:
            return Difference(step, one, other)
    before = _digests(mine)
    before_theirs = _digests(theirs)
    steps = [s for s, digest in before.items() if s <= upto and before_theirs.get(s, digest) != digest]
    return Difference(min(steps), 0, 0) if steps else None


def _digests(history: tuple[int, ...]) -> dict[int, int]:
    """For each change that is listed, a digest of all before it."""
    found = {}
    digest = history[1]
    for step, number in pairs(history):
        found[step] = digest
        digest = digest_with(digest, step, number)
    return found


def entries_in(
    step: int, entries: Mapping[int, Entry], progress: Mapping[int, Progress], agreements: Agreements
) -> dict[int, Entry]:
    """``entries``, and for ranks that are in ``step``, or have passed it, without an entry for it: their earlier
    agreement."""
    found = dict(entries)
    for rank, known in progress.items():
        entry = entries.get(rank)
        if entry is not None and entry.step < step <= known.step and known.state != ENTERING:
            agreed = agreements.description(in_force(known.history, step), rank) or entry.description
            found[rank] = Entry(step, {**agreed, NUMBER: number_in(known, step)}, entry.process)
    return found


def mismatch_on_entry(
    own_rank: int,
    step: int,
    entries: Mapping[int, Entry],
    progress: Mapping[int, Progress],
    agreements: Agreements,
) -> Mismatch | None:
    """The mismatch of this rank, which enters ``step`` with a new plan, and the others, of which some run an earlier
    agreement."""
    entered = entries_in(step, entries, progress, agreements)
    return find_mismatch(own_rank, entered, step) or _shapes_of_some_ranks(own_rank, step, entries, progress)


def _shapes_of_some_ranks(
    own_rank: int, step: int, entries: Mapping[int, Entry], progress: Mapping[int, Progress]
) -> Mismatch | None:
    """The mismatch of this rank, which has other shapes in ``step`` than before, and a rank that runs ``step`` by an
    earlier agreement, as none of its own shapes changed. All else that ranks agree on would differ between the two."""
    mine = entries.get(own_rank)
    if mine is None or mine.step < step:
        return None
    shapes = f"new ones (it receives {mine.description.get(RECEIVES)} and sends {mine.description.get(SENDS)})"
    for rank, known in sorted(progress.items()):
        if known.history and last_change(known.history) < step <= known.history[0]:
            return Mismatch(
                "the shapes of messages", {own_rank: shapes, rank: f"in step {step} those of its last step"}
            )
    return None


def in_force(history: tuple[int, ...], step: int) -> int:
    """The agreement that was used in ``step``; 0 if the history does not contain it."""
    if not history or step > history[0]:
        return 0
    return next((number for since, number in reversed(pairs(history)) if since <= step), 0)


def pairs(history: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(history[2::2], history[3::2], strict=False))


def number_in(at: Progress, step: int) -> str:
    """The program's number of ``step``, which counts calls; "" if the rank has published another step's since."""
    return at.number if at.step == step else ""

"""Whether all ranks enter a step with the same plan and fitting shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron_pp.faults.agreement import RECEIVES, SENDS, Agreements, in_force
from megatron_pp.faults.agreement import difference as first_difference
from megatron_pp.faults.records import ENTERING, Entry, Progress
from megatron_pp.faults.step_number import MOVE, NUMBER, shown


class Mismatch(NamedTuple):
    """What differs: the field and the value of each of two ranks."""

    field: str
    values: dict[int, str]

    def __str__(self) -> str:
        told = ", ".join(f"rank {rank} has {value}" for rank, value in sorted(self.values.items()))
        return f"the ranks of the pipeline do not agree on {self.field}: {told}"


def arrived(entries: Mapping[int, Entry], step: int) -> set[int]:
    """Ranks that have entered ``step`` with a description, or passed on to a later one (which they do only where all
    agreed)."""
    return {rank for rank, entry in entries.items() if entry.step >= step}


def find_mismatch(
    own_rank: int,
    entries: Mapping[int, Entry],
    progress: Mapping[int, Progress],
    step: int,
    agreements: Agreements | None = None,
) -> Mismatch | None:
    """Compare what is known so far with this rank's entry: ranks that entered ``step`` with a description, and ranks
    that are in it with what they agreed on in an earlier step. The lowest rank that differs, in the first field that
    does."""
    mine = entries.get(own_rank)
    if mine is None or mine.step < step:  # what was read last is older than what this rank has told since
        return None
    for rank, entry in sorted(entries.items()):
        known = progress.get(rank)
        # A rank that is entering has yet to tell what it enters with.
        without_new = entry.step < step and known is not None and known.step >= step and known.state != ENTERING
        if entry.step == step or without_new:
            theirs = entry.description
            if without_new and known is not None and agreements is not None:
                theirs = dict(agreements.description(in_force(known.history, step), rank) or theirs)
            if without_new and known is not None:
                theirs = {**theirs, NUMBER: _number_in(known, step)}
            found = _difference(own_rank, mine.description, rank, theirs)
            if found is not None:
                return found
    return None


def find_parting(
    own_rank: int, own: Progress, progress: Mapping[int, Progress], agreements: Agreements
) -> Mismatch | None:
    """Ranks that came back to different agreements in one step: each was agreed on by all before, so that nobody asked
    again."""
    for rank, seen in sorted(progress.items()):
        parting = first_difference(own.history, seen.history)
        if parting is None:
            continue
        if not parting.mine:
            return Mismatch(f"the plans of the steps before {parting.step}", {own_rank: "one", rank: "another"})
        mine = agreements.description(parting.mine, own_rank)
        theirs = agreements.description(parting.theirs, rank)
        found = None
        if mine is not None and theirs is not None:
            mine = {**mine, NUMBER: _number_in(own, parting.step)}
            theirs = {**theirs, NUMBER: _number_in(seen, parting.step)}
            found = _difference(own_rank, mine, rank, theirs)
        values = {own_rank: f"that of agreement {parting.mine}", rank: f"that of agreement {parting.theirs}"}
        return found or Mismatch(f"the plan of step {parting.step}", values)
    return None


def _number_in(at: Progress, step: int) -> str:
    """The program's number of ``step``, counted in calls; "" where the rank has told of another one since."""
    return at.number if at.step == step else ""


def _difference(one: int, mine: Mapping[str, str], other: int, theirs: Mapping[str, str]) -> Mismatch | None:
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        if name in (SENDS, RECEIVES, NUMBER):
            continue
        a, b = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if a != b and name == MOVE:
            return Mismatch(name, {one: shown(a, mine.get(NUMBER)), other: shown(b, theirs.get(NUMBER))})
        if a != b:
            return Mismatch(name, {one: a, other: b})
    for source, target, sends, receives in ((one, other, mine, theirs), (other, one, theirs, mine)):
        sent, received = sends.get(SENDS), receives.get(RECEIVES)
        if target == source + 1 and sent != received:
            name = f"the shape of activations (sent by rank {source}, received by rank {target})"
            return Mismatch(name, {source: str(sent), target: str(received)})
    return None

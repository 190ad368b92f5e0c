"""Whether all ranks enter a step with the same plan, fitting shapes and the same step number (``config.step_number``).

The nth call of one rank always meets the nth call of the others: messages have no other order. So a rank that calls a
step once too often is detected only by the program's own number, and by how it changes: it stays on that rank and goes
on elsewhere. The change is the same in almost every call, so it is part of what the ranks agree on: that costs nothing
while it stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron_pp.faults.agreement import RECEIVES, SENDS, Agreements, in_force
from megatron_pp.faults.agreement import difference as first_difference
from megatron_pp.faults.records import ENTERING, Entry, Progress

MOVE = "step_number"
"""In a description: how the number changed; compared."""
NUMBER = "the number itself"
"""In a description: shown, but not compared, as the changes determine it."""


class StepNumber:
    """The number in the last call of one rank."""

    def __init__(self) -> None:
        self._last: int | None = None

    def move(self, number: int | None) -> str:
        """How ``number`` differs from that of the last call, in words; "" for a program that gives none."""
        if number is None:
            return ""
        before, self._last = self._last, number
        if before is None:
            return f"begins with {number}"
        return f"{number - before:+d} since its last step" if number != before else "as in its last step"


class Mismatch(NamedTuple):
    """What differs: the field and the value of each of two ranks."""

    field: str
    values: dict[int, str]

    def __str__(self) -> str:
        values = ", ".join(f"rank {rank} has {value}" for rank, value in sorted(self.values.items()))
        return f"the ranks of the pipeline do not agree on {self.field}: {values}"


def arrived(entries: Mapping[int, Entry], step: int) -> set[int]:
    """Ranks that have published an entry for ``step``, or for a later one (which they do only after all agreed)."""
    return {rank for rank, entry in entries.items() if entry.step >= step}


def find_mismatch(
    own_rank: int,
    entries: Mapping[int, Entry],
    progress: Mapping[int, Progress],
    step: int,
    agreements: Agreements | None = None,
) -> Mismatch | None:
    """Compare what is known so far with this rank's entry: ranks that entered ``step`` with a description, and ranks
    that are in it with what they agreed on in an earlier step. Returns the lowest rank that differs, in the first field
    that does."""
    mine = entries.get(own_rank)
    if mine is None or mine.step < step:  # what was read is older than what this rank has published since
        return None
    for rank, entry in sorted(entries.items()):
        known = progress.get(rank)
        if entry.step == step:
            theirs = entry.description
        elif known is not None and entry.step < step <= known.step and known.state != ENTERING:
            agreed = agreements.description(in_force(known.history, step), rank) if agreements is not None else None
            theirs = {**(agreed or entry.description), NUMBER: _number_in(known, step)}
        else:  # it has passed this step; or it is not in it yet, or is entering and has yet to publish its entry
            continue
        found = _difference(own_rank, mine.description, rank, theirs)
        if found is not None:
            return found
    return None


def find_late_mismatch(
    own_rank: int, own: Progress, progress: Mapping[int, Progress], agreements: Agreements
) -> Mismatch | None:
    """Ranks that came back to different agreements in one step: all had agreed on each before, so none was compared
    when entering."""
    for rank, seen in sorted(progress.items()):
        first = first_difference(own.history, seen.history)
        if first is None:
            continue
        if not first.mine:
            return Mismatch(f"the plans of the steps before {first.step}", {own_rank: "one", rank: "another"})
        mine = agreements.description(first.mine, own_rank)
        theirs = agreements.description(first.theirs, rank)
        found = None
        if mine is not None and theirs is not None:
            mine = {**mine, NUMBER: _number_in(own, first.step)}
            theirs = {**theirs, NUMBER: _number_in(seen, first.step)}
            found = _difference(own_rank, mine, rank, theirs)
        values = {own_rank: f"that of agreement {first.mine}", rank: f"that of agreement {first.theirs}"}
        return found or Mismatch(f"the plan of step {first.step}", values)
    return None


def _number_in(at: Progress, step: int) -> str:
    """The program's number of ``step``, counted in calls; "" if the rank has published that of another one since."""
    return at.number if at.step == step else ""


def _difference(one: int, mine: Mapping[str, str], other: int, theirs: Mapping[str, str]) -> Mismatch | None:
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        if name in (SENDS, RECEIVES, NUMBER):
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

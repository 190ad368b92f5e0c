"""Where this rank is. The engine only assigns ``position``; the guard's threads read it from here."""

from __future__ import annotations

import time

from megatron_pp.faults.consistency import changed
from megatron_pp.faults.diagnosis import Source, doing, instruction_at, waits_on
from megatron_pp.faults.liveness import this_process
from megatron_pp.faults.records import DONE, ENTERING, IN_STEP, Progress
from megatron_pp.plan.instruction import Instruction


class Outside:
    """A source for work outside any plan."""

    plan = None
    position = 0


class Tracker:
    """One rank's position, and since when it has it. Everything here is cheap and takes no lock.

    source  what this rank executes; None outside steps
    phase   what it does outside the plan, in words
    failed  a failed transfer of this rank, in words, while the guard looks for the cause; else ""
    number  the program's number of the step, as text
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.source: Source | None = None
        self.phase = ""
        self.failed = ""
        self.number = ""
        self.process = this_process()
        self._entering = False
        self._around: list[tuple[Source | None, str]] = []
        self._last: tuple[int, int, str, bool] = (0, 0, "", False)
        self._moved_at = 0.0
        self.step = 0
        self._changes: tuple[int, ...] = ()  # replaced, never altered
        self._done: tuple[int, tuple[int, ...]] = (0, ())  # steps, and changes up to the last of them

    def begin(
        self, source: Source, entering: bool = False, phase: str = "", agreement: int = 0, number: str = ""
    ) -> None:
        """A step begins, or with ``phase`` something else, which may contain steps. ``entering``: plans are compared
        first. ``agreement``: an earlier one that this step comes back to, 0 if it continues with the last step's.
        """
        self._around.append((self.source, self.phase))
        self._entering = entering
        if agreement:
            self._changes = changed(self._changes, self.step + 1, agreement)
        self.number = number
        self.step += source.plan is not None
        self.phase = phase
        self.failed = ""
        self._moved_at = time.monotonic()
        # Publish ``source`` last: observers must never pair the new step with the old plan. ``observe`` reads what is
        # assigned here in the opposite order, for the same reason.
        self.source = source

    def end(self) -> None:
        """What ``begin`` began is over."""
        self._entering = False
        self._done = (self.step, self._changes)
        self.source, self.phase = self._around.pop() if self._around else (None, "")

    def agreed(self, number: int) -> None:
        """The ranks have agreed, under ``number``, on what this step runs with."""
        self._changes = changed(self._changes, self.step, number)
        self._entering = False

    def observe(self) -> Progress | None:
        """Progress now; None outside a step."""
        source = self.source
        if source is None:
            return None
        here = step, position, phase, entering = (self.step, source.position, self.phase, self._entering)
        now = time.monotonic()
        if here != self._last:
            self._last = here
            self._moved_at = now
        at = None if source.plan is None else instruction_at(source.plan, self.rank, position)
        text = phase or ("" if at is None else str(at))
        idle = round(now - self._moved_at, 3)
        history = (step - entering, *self._changes)  # of a step that is being entered nothing is agreed on yet
        state = ENTERING if entering else IN_STEP
        return Progress(step, state, position, text, idle, 0, self.process, history, self.number)

    def finished(self) -> Progress:
        """Progress outside a step, as ``end`` recorded it: the next step may have begun since ``observe`` returned
        None."""
        step, changes = self._done
        return Progress(step, DONE, process=self.process, history=(step, *changes))

    def waits_on(self) -> tuple[int, ...]:
        """Pipeline ranks that this rank may be waiting for: the peers of a transfer; all others outside the plan; none
        while it computes."""
        source = self.source
        if source is None:
            return ()
        at = self._at(source)
        return tuple(r for r in range(self.size) if r != self.rank) if at is None else waits_on(at)

    def place(self) -> tuple[str, str]:
        """The current instruction as printed and in words; outside the plan "", and what else this rank does."""
        at = self._at(self.source)
        if at is not None:
            return str(at), at.name
        return "", "the entry of the step" if self._entering else self.phase or "the step"

    def doing(self) -> str:
        """What this rank does now, as a clause: ``rank 2 waits for ...``."""
        at = self._at(self.source)
        return f"rank {self.rank} {f'is in {self.place()[1]}' if at is None else doing(at)}"

    def _at(self, source: Source | None) -> Instruction | None:
        """The current instruction of ``source``; None outside the plan, and while plans are compared."""
        if source is None or source.plan is None or self._entering or self.phase:
            return None
        return instruction_at(source.plan, self.rank, source.position)

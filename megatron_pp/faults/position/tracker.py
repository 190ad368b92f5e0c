"""Where this rank is. The engine only assigns ``position``; the guard's threads read it from here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from megatron_pp.faults.consistency import changed
from megatron_pp.faults.position.places import Place, Source, instruction_at
from megatron_pp.faults.store.processes import this_process
from megatron_pp.faults.store.records import AFTER, DONE, ENTERING, IN_STEP, NO_HOST, Progress
from megatron_pp.plan.ir.instruction import Instruction

if TYPE_CHECKING:
    from megatron_pp.faults.position.device_events import CompletedWork


class Outside:
    """A source for work outside any plan."""

    plan = None
    position = 0


class Tracker:
    """One rank's position, and since when it has it. Everything here is cheap and takes no lock.

    source  what the host executes; None outside steps
    phase   what it does outside the plan, in words
    after   what follows the last step, in words, where that is watched; else ""
    failed  a failed transfer of this rank, in words, while the guard looks for the cause; else ""
    number  the program's number of the step, as text
    is_entering  whether plans are compared, before the step's first instruction
    completed  what the device has done, where the host runs ahead of it; else None"""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.completed: CompletedWork | None = None
        self.after = ""
        self.source: Source | None = None
        self.phase = ""
        self.failed = ""
        self.number = ""
        self.process = this_process()
        self.is_entering = False
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
        first. ``agreement``: an earlier one that this step comes back to, 0 if it continues with the last step's."""
        self._around.append((self.source, self.phase))
        self.is_entering = entering
        if agreement:
            self._changes = changed(self._changes, self.step + 1, agreement)
        self.number = number
        self.step += source.plan is not None
        self.phase = phase
        self._moved_at = time.monotonic()
        # Publish ``source`` last: observers must never pair the new step with the old plan. ``observe`` reads what is
        # assigned here in the opposite order, for the same reason.
        self.source = source

    def end(self, after: str = "") -> None:
        """End for the host what ``begin`` began. ``after``: the next phase, if it is watched."""
        self.is_entering = False
        self._done = (self.step, self._changes)
        self.after = after if len(self._around) == 1 else ""
        self.source, self.phase = self._around.pop() if self._around else (None, "")

    @property
    def is_within(self) -> bool:
        """Whether the host is in something that was begun and has not ended."""
        return bool(self._around)

    def rest(self) -> None:
        """Nothing is watched until the next step."""
        self.after = ""

    def mark(self, phase: str = "") -> None:
        """The host has issued the current instruction or, with ``phase``, what it does outside the plan."""

    def where(self) -> Place | None:
        """The place of the device or, if it has finished, of the host; None outside steps."""
        return self.of_host()

    def host(self) -> tuple[int, float]:
        """Where the host runs ahead (``host_ahead.py``): how many instructions of its step's program it has issued, and
        for how many seconds neither it nor the device was seen to do anything."""
        return NO_HOST, 0.0

    def of_host(self) -> Place | None:
        source = self.source
        if source is not None:
            return Place(self.step, source.plan, source.position, self.phase)
        return Place(self.step, None, 0, self.after) if self.after else None

    def instruction(self, place: Place | None) -> Instruction | None:
        """The instruction at ``place``; None outside the plan, and while plans are compared."""
        if place is None or place.plan is None or self.is_entering or place.phase:
            return None
        return instruction_at(place.plan, self.rank, place.position)

    def agreed(self, number: int) -> None:
        """The ranks have agreed, under ``number``, on what this step runs with."""
        self._changes = changed(self._changes, self.step, number)
        self.is_entering = False

    def observe(self) -> Progress | None:
        """Progress now; None outside a step."""
        where = self.where()
        if where is None:
            return None
        now, step, entering = time.monotonic(), self.step, self.is_entering
        here = (where.step, where.position, where.phase, entering)
        if here != self._last:
            self._last = here
            self._moved_at = now
        text = where.phase or str(self.instruction(where) or "")
        if where.step != step:
            text += f" of step {where.step}"
        idle = round(now - self._moved_at, 3)
        history = (step - entering, *self._changes)  # of a step that is being entered nothing is agreed on yet
        state = ENTERING if entering else AFTER if where.phase and where.phase == self.after else IN_STEP
        whose = self.process, history, self.number
        return Progress(step, state, where.position, text, idle, 0, *whose, *self.host())

    def finished(self) -> Progress:
        """Progress outside a step, as ``end`` recorded it: the next step may have begun since ``observe`` returned
        None."""
        step, changes = self._done
        return Progress(step, DONE, process=self.process, history=(step, *changes))

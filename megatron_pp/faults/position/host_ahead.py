"""Tracks a rank whose host runs ahead of its device. The rank's position is that of the device."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from megatron_pp.faults.position.places import Place, Source, waits_on
from megatron_pp.faults.position.tracker import Tracker
from megatron_pp.faults.store.records import NO_HOST
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction

if TYPE_CHECKING:
    from megatron_pp.faults.position.device_events import CompletedWork

_UNMOVED = 1.0  # seconds in an instruction, after which the tracker checks whether the host moves within it
_NOT_ON_A_STREAM = ins.POST_OPS | ins.HAND_OPS | {ins.BATCH}


class TrackerOfDevice(Tracker):
    """The tracker of such a rank. ``completed``: what the device has completed."""

    completed: CompletedWork

    def __init__(self, rank: int, size: int, completed: CompletedWork) -> None:
        super().__init__(rank, size)
        self.completed = completed
        self._thread = 0  # the thread that runs the steps
        self._host_place = (0, 0)  # the host's step, and its position in the program
        self._host_places: tuple[tuple[int, int], ...] | None = None  # the place in Python code at which it was seen
        self._host_moved_at = 0.0

    def begin(
        self, source: Source, entering: bool = False, phase: str = "", agreement: int = 0, number: str = ""
    ) -> None:
        self._thread = threading.get_ident()
        super().begin(source, entering, phase, agreement, number)

    def rest(self) -> None:
        super().rest()
        self.completed.clear()

    def mark(self, phase: str = "") -> None:
        if self.source is not None:
            self.completed.mark(Place(self.step, self.source.plan, self.source.position, self.phase or phase))

    def where(self) -> Place | None:
        mark = None if self.is_entering else self.completed.oldest
        return mark or self.of_host()

    def host(self) -> tuple[int, float]:
        """The number of instructions of its step's program that the host has issued (NO_HOST outside plans), and the
        seconds for which host and device were seen to do nothing but wait: the host has stayed at one place in its
        code, and the device has done all that was issued except transfers. If no query of an event returns, the host is
        in a call that waits for the device, and the device then counts as waiting."""
        source = self.source
        if source is None or source.plan is None:
            return NO_HOST, 0.0
        issued = 0 if self.is_entering else len(source.plan.programs[self.rank]) if self.phase else source.position
        now, place = time.monotonic(), (self.step, issued)
        if place != self._host_place:
            self._host_place, self._host_places, self._host_moved_at = place, None, now
        elif self._device_computes():
            self._host_moved_at = max(self._host_moved_at, self.completed.known_at)
        elif now - self._host_moved_at >= _UNMOVED:
            from megatron_pp.faults.position import host_threads

            places = host_threads.places(self._thread)
            if self._host_places not in (None, places):
                self._host_moved_at = now
            self._host_places = places
        return issued, round(now - self._host_moved_at, 3)

    def _device_computes(self) -> bool:
        """Whether the device, when it was last seen, was in an operation that waits for no message."""
        mark = self.completed.oldest
        at = self.instruction(mark)
        return mark is not None and (at is None or not waits_on(at))


class InstructionMarks:
    """An observer of the engine that marks the instructions which the host has issued."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def begin(self, at: Instruction) -> None:
        """Does nothing: marks are set at the end of instructions."""

    def end(self, at: Instruction) -> None:
        if at.op not in _NOT_ON_A_STREAM:
            self._tracker.mark()

"""What a device has completed, where ``wait`` does not block the host (NCCL).

There the host runs ahead of the device, by a step or more. So an event is recorded on the current stream after every
instruction, and the watchdog asks which of them are over: the first one that is not is where the rank is.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from typing import Any, NamedTuple

import torch

from megatron_pp.plan.spec import Plan

logger = logging.getLogger("megatron_pp")

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class Place(NamedTuple):
    """A place in a step: a position in the program of ``plan``, or with ``phase``, in words, outside of it."""

    step: int
    plan: Plan | None
    position: int
    phase: str


class CompletedWork:
    """Marks on the streams of one rank, over all steps. The main thread adds them; the watchdog alone asks and removes,
    as a query may block while another thread synchronises the device."""

    def __init__(self) -> None:
        self._marks: deque[tuple[Place, Any]] = deque()

    def mark(self, place: Place) -> None:
        """``place`` is over when all that was issued to the current stream is."""
        event = torch.cuda.Event()
        event.record()
        self._marks.append((place, event))

    def poll(self) -> None:
        """Remove the marks that are over."""
        try:
            while self._marks[0][1].query():
                self._marks.popleft()
        except IndexError:  # all are over, or forgotten by the main thread
            return
        except RuntimeError as error:  # of an earlier kernel; the main thread gets it too
            logger.debug("the device cannot be asked any more: %s", error)
            self._marks.clear()

    def clear(self) -> None:
        """Forget what is not over."""
        self._marks.clear()

    @property
    def oldest(self) -> Place | None:
        """The first mark that is not over; None if all are."""
        try:
            return self._marks[0][0]
        except IndexError:  # another thread may have removed it just now
            return None


def query_during_captures() -> None:
    """For the watchdog's thread: let it query events while the main thread captures a CUDA graph. By default that is an
    error and ends the capture (``cudaThreadExchangeStreamCaptureMode``); torch has no function for it."""
    if torch.version.cuda is None:
        return
    name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"  # torch has loaded it
    try:
        ctypes.CDLL(name).cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    except (OSError, AttributeError) as error:
        logger.warning("%s: capturing a CUDA graph may fail while a pipeline step is watched: %s", name, error)

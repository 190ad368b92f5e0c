"""The threads of this process that may run a step, and their places in Python code."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_LAST = 8  # number of frames of a thread that are shown


def frames(caller: int) -> list[FrameType]:
    """The innermost frames of the thread ``caller`` (an ident), which calls steps, and of threads that no Python code
    has started. Autograd has such a thread for each device: it runs backwards and recomputation there, while the caller
    stays at one place. The frame of ``caller`` comes first."""
    started = {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    # Without this call's own frame: it would hold itself by its variable, a cycle with all that other frames hold.
    here = threading.get_ident()
    found = {ident: frame for ident, frame in sys._current_frames().items() if ident != here}
    first = found.pop(caller, None)
    others = [frame for ident, frame in found.items() if ident not in started]
    return others if first is None else [first, *others]


def places(caller: int) -> tuple[tuple[int, int], ...]:
    """The places of the threads of ``frames``. Two answers are equal if no thread has moved between them."""
    found = []
    frame: FrameType | None
    for frame in frames(caller):
        while frame is not None:
            found.append((id(frame), frame.f_lasti))
            frame = frame.f_back
    return tuple(found)


def stacks(caller: int) -> str:
    """The ends of the stacks of ``frames``, printed as in a traceback."""
    return "In another thread, as of autograd:\n".join(
        "".join(traceback.format_stack(frame)[-_LAST:]) for frame in frames(caller)
    )

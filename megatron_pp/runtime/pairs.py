"""Overlapped slots: what runs the forward of one microbatch together with the backward of another.

Set ``config.overlapped_forward_backward`` to ``in_turn``, ``on_two_streams`` or a function of your own: plans then
have pairs (``pair_up`` in ``plan/instruction.py``), and the engine calls the function with both halves of each. A
function of your own may interleave the halves as its model allows, as DualPipeV does with the all-to-alls of experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_pp.errors import ScheduleInputError
from megatron_pp.plan.tasks import Task


@dataclass
class HalfCall:
    """One half of a pair. Calling it runs the half, from its input to its output; it must be called exactly once.

    chunk, microbatch  which it is; ``chunk`` counts this rank's model chunks
    model              the model chunk, wrapped as it was given
    """

    chunk: int
    microbatch: int
    model: Any
    run: Callable[[], None]
    called: bool = False

    def __call__(self) -> None:
        if self.called:
            raise ScheduleInputError(
                f"overlapped_forward_backward ran chunk {self.chunk}, microbatch {self.microbatch} twice; each half is "
                "called once"
            )
        self.called = True
        self.run()


OverlappedForwardBackward = Callable[[HalfCall, HalfCall], Any]


def in_turn(forward_call: HalfCall, backward_call: HalfCall) -> None:
    """The forward, then the backward, as without pairs."""
    forward_call()
    backward_call()


def on_two_streams(forward_call: HalfCall, backward_call: HalfCall) -> None:
    """The backward on the current CUDA stream, the forward on another one beside it; in turn without a CUDA device.

    Both streams wait for each other before and after, so that memory can go from one to the other. The other stream is
    the same for all pairs: torch has 32 of a priority, and the next one would be that of an NCCL communicator.
    """
    if not torch.cuda.is_available():
        in_turn(forward_call, backward_call)
        return
    current = torch.cuda.current_stream()
    side = _side_stream(current.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        forward_call()
    backward_call()
    current.wait_stream(side)


PAIR_FUNCTIONS: dict[str, OverlappedForwardBackward] = {"in_turn": in_turn, "on_two_streams": on_two_streams}
"""By the name that a flag or a file has for them."""


class _SideStreams(threading.local):
    """By device; a thread has its own, as it has a current stream of its own."""

    def __init__(self) -> None:
        self.of: dict[torch.device, torch.cuda.Stream] = {}


_SIDE_STREAMS = _SideStreams()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDE_STREAMS.of:
        _SIDE_STREAMS.of[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS.of[device]


def _run(handlers: Mapping[str, Callable[[Task], None]], half: Sequence[Task]) -> None:
    for at in half:
        handlers[at.op](at)


@dataclass(eq=False)
class PairRunner:
    """Runs pairs by the user's function; ``models`` are the chunks of one rank."""

    function: OverlappedForwardBackward
    models: Sequence[Any]

    def run(self, pair: Task, handlers: Mapping[str, Callable[[Task], None]]) -> None:
        """Raises ScheduleInputError where the function left one of the halves out."""
        forward_call, backward_call = (
            HalfCall(at.chunk, at.mb, self.models[at.chunk], partial(_run, handlers, half))
            for half in pair.halves
            for at in half[:1]
        )
        self.function(forward_call, backward_call)
        left_out = [name for name, call in (("forward", forward_call), ("backward", backward_call)) if not call.called]
        if left_out:
            raise ScheduleInputError(
                f"overlapped_forward_backward returned without having called the {' and the '.join(left_out)}; it "
                "must call both halves once"
            )

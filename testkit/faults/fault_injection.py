"""Injected faults: a stage of the toy model raises, dies, stops, or is slow, at a given step, chunk and microbatch."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from megatron_pp.testing.toy import HIDDEN, ToyBlock, ToyData

EXCEPTION = "exception"  # in forward_step_func
DATA = "data iterator"  # the data iterator raises
BACKWARD = "backward"  # an exception in backward
MEMORY = "out of memory"
SHAPE = "wrong shape"
KILL = "kill"
STOP = "stop"
DELAY = "delay"
HOLD = "hold"  # a delay in C++ that keeps the interpreter lock, so that no thread of the process runs
OWN_ERRORS = (EXCEPTION, DATA, BACKWARD, MEMORY, SHAPE)
KINDS = (*OWN_ERRORS, KILL, STOP, DELAY)


class Fault(NamedTuple):
    """A fault: its kind, place and time. ``seconds``: those of a delay, or those for which a rank stops before it is
    killed."""

    kind: str
    rank: int
    step: int
    chunk: int
    mb: int
    seconds: float = 0.0

    @property
    def instruction(self) -> str:
        """The text of the instruction in which the fault happens."""
        return f"{'B' if self.kind == BACKWARD else 'F'}{self.chunk}.{self.mb}"

    @property
    def message(self) -> str:
        """The exception's message."""
        return f"injected fault in step {self.step}, chunk {self.chunk}, microbatch {self.mb}"


class InjectedError(Exception):
    """The error that a user's code raises."""


class Trigger:
    """Sets the fault off. ``step`` is the step under way; ``on_fire`` is called right before."""

    def __init__(self, fault: Fault | None, on_fire: Callable[[], None]) -> None:
        self.fault = fault
        self.step = 0
        self._on_fire = on_fire

    def due(self, kinds: tuple[str, ...], chunk: int, mb: int) -> bool:
        """Whether a fault of one of ``kinds`` is to happen here and now."""
        fault = self.fault
        return (
            fault is not None and fault.kind in kinds and (fault.step, fault.chunk, fault.mb) == (self.step, chunk, mb)
        )

    def fire(self) -> None:
        """Do it. Returns only from a delay, a wrong shape, and a stop that was ended."""
        fault = self.fault
        assert fault is not None
        self._on_fire()
        if fault.kind == KILL and fault.seconds:
            # The rank is stopped first, so that messages to it are half sent when it dies.
            subprocess.Popen(["/bin/sh", "-c", f"sleep {fault.seconds}; kill -KILL {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind in (KILL, STOP):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == KILL else signal.SIGSTOP)
        elif fault.kind == DELAY:
            time.sleep(fault.seconds)
        elif fault.kind == HOLD:
            ctypes.PyDLL(None).usleep(round(1e6 * fault.seconds))
        elif fault.kind == MEMORY:
            raise torch.OutOfMemoryError(fault.message)
        elif fault.kind != SHAPE:
            raise InjectedError(fault.message)


class FaultyBlock(ToyBlock):
    """A stage of the toy model with a trigger. It counts microbatches from ``begin_step`` on."""

    def __init__(self, stage: int, chunk: int, trigger: Trigger, hidden: int = HIDDEN) -> None:
        super().__init__(stage, hidden)
        self.chunk = chunk
        self.trigger = trigger
        self._count = 0

    def begin_step(self) -> None:
        """The next microbatch is number 0."""
        self._count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mb, self._count = self._count, self._count + 1
        trigger = self.trigger
        if trigger.due((EXCEPTION, MEMORY, KILL, STOP, DELAY, HOLD), self.chunk, mb):
            trigger.fire()
        y = super().forward(x)
        if trigger.due((BACKWARD,), self.chunk, mb):
            y.register_hook(lambda grad: trigger.fire())
        if trigger.due((SHAPE,), self.chunk, mb):
            trigger.fire()
            return torch.cat([y, y])
        return y


def faulty_iterator(data: ToyData, chunk: int, trigger: Trigger) -> Iterator[Any]:
    """The microbatches of ``data``. Raises if the fault is in the data iterator."""
    for mb in range(data.num_microbatches):
        if trigger.due((DATA,), chunk, mb):
            trigger.fire()
        yield data.microbatch(mb)

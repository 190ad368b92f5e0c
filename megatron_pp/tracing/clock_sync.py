"""How far the clocks of a pipeline's ranks are apart, found by messages between neighbours before a step.

Rank r and rank r + 1 bounce a small message back and forth. In the quickest round trip the answer was given half a
round trip after the question, give or take that half (the estimate of Cristian, Distributed Computing 3, 1989). What
rank r knows of its distance from rank 0 it hands on, so P ranks take P - 1 such conversations, one after another.

Processes of one machine read the same monotonic clock: there, a difference below the round trip is noise, and zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_pp.comm.transport import ACT, GRAD, Transport

_ROUNDS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Clock = Callable[[], int]


class Agreement(NamedTuple):
    """What a rank knows after the conversation.

    run    the number that rank 0 gave, the same on all ranks
    ahead  nanoseconds by which this rank's clock is ahead of rank 0's
    """

    run: int
    ahead: int


def agree_on_clocks(transport: Transport, clock: Clock, run: int = 0) -> Agreement:
    """Collective over the pipeline; the channels between neighbours must have been prepared. ``run`` is rank 0's.

    ``clock`` gives nanoseconds, and is only ever compared with itself.
    """
    known = Agreement(run, 0)
    if transport.rank > 0:
        known = _answer(_Line(transport, transport.rank - 1, GRAD, ACT), clock)
    if transport.rank < transport.size - 1:
        _ask(_Line(transport, transport.rank + 1, ACT, GRAD), clock, known)
    return known


class _Line:
    """Small messages of whole numbers to and from one neighbour."""

    def __init__(self, transport: Transport, peer: int, outward: str, inward: str) -> None:
        self.transport = transport
        self.peer = peer
        self.outward = outward
        self.inward = inward

    def tell(self, *numbers: int) -> None:
        message = torch.tensor(numbers, dtype=torch.int64, device=self.transport.device)
        self.transport.isend(message, self.peer, self.outward).wait()

    def hear(self, count: int) -> list[int]:
        message = torch.empty(count, dtype=torch.int64, device=self.transport.device)
        self.transport.irecv(message, self.peer, self.inward).wait()
        return [int(number) for number in message.tolist()]  # on a GPU this waits for the message


def _ask(line: _Line, clock: Clock, known: Agreement) -> None:
    best: tuple[int, int] | None = None  # round trip, how far the neighbour is ahead
    for _ in range(_ROUNDS):
        asked = clock()
        line.tell(0)
        (theirs,) = line.hear(1)
        answered = clock()
        round_trip = answered - asked
        if best is None or round_trip < best[0]:
            best = (round_trip, theirs - (asked + answered) // 2)
    assert best is not None
    line.tell(known.run, known.ahead, *best, machine_number())


def _answer(line: _Line, clock: Clock) -> Agreement:
    for _ in range(_ROUNDS):
        line.hear(1)
        line.tell(clock())
    run, their_ahead, round_trip, ahead, machine = line.hear(5)
    if machine == machine_number() and abs(ahead) <= round_trip:
        ahead = 0
    return Agreement(run, their_ahead + ahead)


def machine_number() -> int:
    """The same for all processes that share this machine's monotonic clock since its last boot; 63 bits."""
    try:
        text = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # no such file: take no two processes to share a clock
        text = str(id(_BOOT_ID))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

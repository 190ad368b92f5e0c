"""Measures how far the clocks of a pipeline's ranks are apart, by messages between neighbours before a step.

Rank r and rank r + 1 exchange a small message back and forth. In the shortest round trip the answer was given half a
round trip after the question, give or take that half (the estimate of Cristian, Distributed Computing 3, 1989). Rank r
passes on its own distance from rank 0, so P ranks take P - 1 such exchanges, one after another.

Processes of one machine read the same monotonic clock: there, a difference below the round trip is noise, and zero.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_pp.comm.link_timing import receive_numbers, send_numbers
from megatron_pp.comm.transport import ACT, GRAD, Transport

_ROUNDS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Clock = Callable[[], int]


class Agreement(NamedTuple):
    """run: the number that rank 0 gave, the same on all ranks. ahead: nanoseconds by which this rank's clock is ahead
    of rank 0's."""

    run: int
    ahead: int


def agree_on_clocks(transport: Transport, clock: Clock, run: int = 0) -> Agreement:
    """Compare the clocks. Collective over the pipeline; channels between neighbours must have been prepared. Rank 0's
    ``run`` is passed on to all ranks. ``clock`` returns nanoseconds."""
    known = Agreement(run, 0)
    if transport.rank > 0:
        known = _answer(transport, transport.rank - 1, clock)
    if transport.rank < transport.size - 1:
        _ask(transport, transport.rank + 1, clock, known)
    return known


def _ask(transport: Transport, peer: int, clock: Clock, known: Agreement) -> None:
    rounds: list[tuple[int, int]] = []  # round trip, how far the neighbour is ahead
    for _ in range(_ROUNDS):
        asked = clock()
        send_numbers(transport, peer, ACT, [0])
        (theirs,) = map(int, receive_numbers(transport, peer, GRAD, 1))
        answered = clock()
        rounds.append((answered - asked, theirs - (asked + answered) // 2))
    send_numbers(transport, peer, ACT, [*known, *min(rounds, key=lambda one: one[0]), _machine_number()])


def _answer(transport: Transport, peer: int, clock: Clock) -> Agreement:
    for _ in range(_ROUNDS):
        receive_numbers(transport, peer, ACT, 1)
        send_numbers(transport, peer, GRAD, [clock()])
    run, their_ahead, round_trip, ahead, machine = map(int, receive_numbers(transport, peer, ACT, 5))
    if machine == _machine_number() and abs(ahead) <= round_trip:
        ahead = 0
    return Agreement(run, their_ahead + ahead)


def _machine_number() -> int:
    """A number of 63 bits that is the same for all processes that share this machine's clock since its last boot."""
    try:
        text = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # no such file: assume that no two processes share a clock
        text = str(id(_BOOT_ID))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

"""A simulated (or recorded) step: what each rank ran when, what it waited for, and what went over which link."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_pp.plan.costs.activations import host_timeline, peak_activations
from megatron_pp.plan.ir.instruction import NONE, Instruction
from megatron_pp.plan.ir.spec import Plan


class Event(NamedTuple):
    """One instruction of one rank, from when the rank reached it until the rank continued."""

    instruction: Instruction
    start: float
    end: float


class Transfer(NamedTuple):
    """One message between two ranks.

    kind         FORWARD for an activation, BACKWARD for a gradient
    stage, mb    receiving stage and microbatch
    part         part of the microbatch; NONE where microbatches are whole
    send_posted, receive_posted  when each end was posted
    ready        when both ends were posted and at the head of their queues
    start, end   on the wire, and until it is there
    """

    source: int
    target: int
    kind: str
    stage: int
    mb: int
    size: float
    send_posted: float
    receive_posted: float
    ready: float
    start: float
    end: float
    part: int = NONE


@dataclass
class Waits:
    """Time that a rank waited, by cause.

    peer_late  the other side had not posted its end: it was still computing, or waiting itself
    queued     both ends were posted, behind other messages of their channel or link
    transfer   the message was on its way
    release    its own send was not over, so the buffer could not be freed
    copy       a copy between device and host
    """

    peer_late: float = 0.0
    queued: float = 0.0
    transfer: float = 0.0
    release: float = 0.0
    copy: float = 0.0

    @property
    def total(self) -> float:
        return self.peer_late + self.queued + self.transfer + self.release + self.copy

    def add_receive(self, since: float, until: float, transfer: Transfer) -> None:
        """The rank was in the WAIT on ``transfer`` from ``since`` to ``until``."""
        posted = max(transfer.send_posted, transfer.receive_posted)
        self.peer_late += max(0.0, min(until, posted) - since)
        self.queued += max(0.0, min(until, transfer.start) - max(since, posted))
        self.transfer += max(0.0, until - max(since, transfer.start))


class TransferLog:
    """All transfers, in columns: half a million of them fit in some 50 MB."""

    def __init__(self) -> None:
        self._whole = array("l")  # source, target, stage, mb, part in turn
        self._kinds = bytearray()
        self._times = array("d")  # size, send_posted, receive_posted, ready, start, end in turn

    def append(self, t: Transfer) -> None:
        self._whole.extend((t.source, t.target, t.stage, t.mb, t.part))
        self._kinds.append(ord(t.kind))
        self._times.extend((t.size, t.send_posted, t.receive_posted, t.ready, t.start, t.end))

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, i: int) -> Transfer:
        source, target, stage, mb, part = self._whole[5 * i : 5 * i + 5]
        size, sent, received, ready, start, end = self._times[6 * i : 6 * i + 6]
        return Transfer(source, target, chr(self._kinds[i]), stage, mb, size, sent, received, ready, start, end, part)

    def __iter__(self) -> Iterator[Transfer]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True)
class Simulation:
    """A simulated step of a plan.

    starts, ends  ``[rank][i]`` belong to ``plan.timed(rank)[i]``
    copies        per rank, when each copy between device and host, or collective of replicas, began and ended, under
                  what posted it
    """

    plan: Plan
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    transfers: TransferLog
    waits: tuple[Waits, ...]
    busy: tuple[float, ...]
    copies: tuple[tuple[Event, ...], ...] = ()

    def events(self, rank: int) -> Iterator[Event]:
        """(instruction, start, end) along ``rank``'s program."""
        return map(Event, self.plan.timed(rank), self.starts[rank], self.ends[rank])

    @property
    def makespan(self) -> float:
        """From the first instruction of any rank to the last of any."""
        return max((e[-1] for e in self.ends if len(e)), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the part of the makespan in which it computes nothing."""
        return tuple(self.makespan - b for b in self.busy)

    @property
    def bubble_share(self) -> float:
        """Share of all ranks' time that no compute fills: 1 - sum(busy) / (P * makespan). 0 for an empty plan."""
        whole = self.makespan * len(self.busy)
        return 1.0 - sum(self.busy) / whole if whole else 0.0

    def volume(self) -> dict[tuple[int, int], tuple[int, float]]:
        """(source rank, destination rank) -> (messages, bytes) sent over that link in one step."""
        sums: dict[tuple[int, int], tuple[int, float]] = {}
        for t in self.transfers:
            messages, size = sums.get((t.source, t.target), (0, 0.0))
            sums[(t.source, t.target)] = (messages + 1, size + t.size)
        return dict(sorted(sums.items()))

    def peak_on_host(self) -> tuple[float, ...]:
        """Per rank, the most that is in host memory at the same time, in units of one chunk's forward."""
        plan = self.plan
        ones = (1,) * self.plan.placement.num_stages
        lines = zip(plan.programs, plan.placement.stages, strict=True)
        return tuple(max(host_timeline(line, row, ones), default=0) / plan.spec.num_parts for line, row in lines)

    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most forwards whose activations are on the device, until their weight gradients, as papers
        count. An evaluation has none.
        """
        parts = self.plan.spec.num_parts
        return tuple(round(parts * peak) for peak in peak_activations(self.plan, 1.0))

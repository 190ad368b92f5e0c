"""How the simulator charges the instructions of features: what they take, and what a rank waits for in them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Protocol

from megatron_pp.feature_table import ROW_OF
from megatron_pp.on_demand import load
from megatron_pp.plan.costs.stage_costs import Network, StageCosts
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.dataflow import Message
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import Plan
from megatron_pp.plan.simulate.simulation import Event, Transfer, Waits
from megatron_pp.plan.verify.queues import Entry, Gathering

_BY_THE_CORE = ins.COMPUTE_OPS | ins.COLLECTIVE_OPS
CHARGED = {op for op, row in ROW_OF.items() if row.costs} - _BY_THE_CORE
"""The instructions that a rank reaches by itself and that a feature charges."""


class SimulatedRank:
    """The recorded times of one rank, and its posted transfers.

    beside        what runs beside the program, under the instruction that posted it
    beside_until  when all of it is over that a device's synchronisation waits for
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.starts = array("d")
        self.ends = array("d")
        self.busy = 0.0
        self.waits = Waits()
        self.posted: dict[Message, Entry] = {}
        self.beside: list[Event] = []
        self.beside_until = 0.0

    def note(self, start: float, end: float) -> None:
        self.starts.append(start)
        self.ends.append(end)

    def run_beside(self, event: Event) -> None:
        """``event`` runs on the rank's device beside its program."""
        self.beside.append(event)
        self.beside_until = max(self.beside_until, event.end)

    def add_wait(self, op: str, since: float, now: float, entry: Entry) -> None:
        """The rank waited in a ``op`` until ``now`` for ``entry``; put the time down to its cause."""
        if op in ins.FREE_OPS:
            self.waits.release += now - since
        elif entry.last is not None:
            self.waits.add_receive(since, now, entry.last)


class SimulatedStep(Protocol):
    """The interface of the simulator for features.

    now        the time
    shares     of each part of a microbatch in the times of ``costs``, by ``Instruction.part``
    one_queue  whether a rank waits until what it posts is at the head of the device's one queue
    """

    plan: Plan
    costs: StageCosts
    network: Network
    shares: tuple[float, ...]
    one_queue: bool
    now: float
    ranks: list[SimulatedRank]

    def time_of(self, one: Instruction) -> float:
        """The time of a compute operation."""

    def post(self, me: SimulatedRank, at: Instruction) -> Entry:
        """``me`` posts a send, a receive, a BATCH or a collective."""

    def in_front_of(self, entry: Entry) -> Entry | None:
        """The entry that holds back all that follows ``entry``, which was just posted, on its rank."""


class Charges:
    """The charges of one feature in one simulated step. By default its instructions take no time."""

    def __init__(self, run: SimulatedStep) -> None:
        self.run = run
        self.prepare()

    def prepare(self) -> None:
        """Make what it keeps of the step."""

    def reached(self, rank: SimulatedRank, at: Instruction) -> Iterator[Entry | float]:
        """``rank`` has reached ``at``, one of its instructions that is neither compute nor a collective. Yields what
        the rank waits for: an entry, or a time.
        """
        return iter(())

    def joined(self, rank: SimulatedRank, at: Instruction) -> Iterator[Entry | float]:
        """``rank`` runs joined operations with sends in them: note the times of each, and yield what it waits for."""
        return iter(())

    def transfer(self, ends: Gathering, now: float) -> Transfer:
        """All ranks have posted one of its collectives: when that is over."""
        at = ends[0].at
        return Transfer(ends[0].entry.rank, ends[0].entry.rank, at.op, at.stage, at.mb, 0.0, now, now, now, now, now)

    def began(self, ends: Gathering, transfer: Transfer) -> None:
        """One of its collectives began."""


class ChargesByFeature:
    """The charges of the features in a step. Each is made at the feature's first instruction."""

    def __init__(self, run: SimulatedStep) -> None:
        self._run = run
        self._made: dict[str, Charges] = {}

    def of(self, op: str) -> Charges:
        """The charges of the feature that has ``op``."""
        row = ROW_OF[op]
        if row.folder not in self._made:
            kind = load(row.costs).CHARGES if row.costs else Charges
            self._made[row.folder] = kind(self._run)
        return self._made[row.folder]

"""The keys in the job's store under which the ranks publish where they are and what failed.

Needed are torch's Store methods ``set``, ``get``, ``check``, ``add`` and ``compare_set``. A call on a TCPStore blocks
while another thread's ``get`` or ``wait`` on the same client does, so this is a client of its own; it reads only keys
that ``check`` has found, since ``get`` waits for a missing key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from megatron_pp.faults.records import EXCEPTION, Entry, Failure, Progress, Record, decode, encode

_ROOT = "megatron_pp"
_CALL_TIMEOUT = timedelta(seconds=30)


@dataclass(eq=False)
class FaultStore:
    """One rank's access. All methods may block as long as the network does: call them from the heartbeat thread.

    pipeline      name of the pipeline group, the same on its members and different from other groups', also from those
                  over the same ranks
    rank, size    within the pipeline group
    global_rank   this rank in the whole job
    members       the pipeline's ranks, as global ranks

    Failures are visible in the whole job: tensor- and data-parallel peers of a failed pipeline would hang as well. The
    epoch hides keys from before a re-initialisation. It counts the objects made over these ranks, as a rank may be in
    more pipelines than its peers, one after the other. Threads may make those of several pipelines over the same ranks
    in different orders, so the first member to make one sets its epoch."""

    store: Any
    pipeline: str
    rank: int
    size: int
    global_rank: int
    members: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.store = private_client(self.store)
        self._batched = bool(getattr(self.store, "has_extended_api", bool)())
        ranks = "-".join(map(str, self.members)) or self.pipeline
        made = self.store.add(f"{_ROOT}/made over {ranks}/{self.global_rank}", 1)
        nth = self.store.add(f"{_ROOT}/made {self.pipeline}/{self.global_rank}", 1)
        self._life = f"{_ROOT}/life {nth} of {self.pipeline}"
        self.epoch = int(self.store.compare_set(f"{self._life}/epoch", "", str(made)))
        self._before = self.store.add(self._job("tickets"), 0)
        self._known: dict[str, set[int]] = {}

    def publish_failure(self, failure: Failure) -> None:
        """Publish it to the job. Readers see the record before they see that there is one."""
        ticket = self.store.add(self._job("tickets"), 1)
        self.store.set(self._job(f"failure/{ticket}"), encode(failure))
        self.store.set(self._job("failed"), "1")

    def read_failure(self) -> Failure | None:
        """The first error that a rank raised, or else the first failure published. One ``check`` if there is none."""
        if not self.store.check([self._job("failed")]):
            return None
        found = []
        for ticket in range(1, self.store.add(self._job("tickets"), 0) + 1):
            key = self._job(f"failure/{ticket}")
            if self.store.check([key]):
                failure = decode(Failure, self.store.get(key))
                # A member that published a failure in another pipeline and then went on to this one has handled it.
                handled = ticket <= self._before and failure.global_rank in self.members
                if failure.pipeline == self.pipeline or not handled:
                    found.append(failure)
        return min(found, key=lambda failure: failure.kind != EXCEPTION, default=None)

    def publish(self, record: Progress | Entry) -> None:
        """Replace this rank's last record of that type."""
        self.store.set(self._own(type(record).__name__, self.rank), encode(record))

    def read_all(self, kind: type[Record]) -> dict[int, Record]:
        """The newest record of type ``kind``, Progress or Entry, of every rank that has one."""
        known = self._known.setdefault(kind.__name__, set())
        for rank in range(self.size):
            if rank not in known and self.store.check([self._own(kind.__name__, rank)]):
                known.add(rank)
        ranks = sorted(known)
        keys = [self._own(kind.__name__, rank) for rank in ranks]
        values = self.store.multi_get(keys) if self._batched and keys else [self.store.get(key) for key in keys]
        return {rank: decode(kind, value) for rank, value in zip(ranks, values, strict=True)}

    def _job(self, name: str) -> str:
        return f"{_ROOT}/{self.epoch}/{name}"

    def _own(self, what: str, rank: int) -> str:
        return f"{self._life}/{what}/{rank}"


def private_client(store: Any) -> Any:
    """A client of the same store with a connection of its own, if the kind of store has connections."""
    from torch.distributed import PrefixStore, TCPStore

    if hasattr(store, "clone"):
        return store.clone()
    below = store  # older versions of torch
    while isinstance(below, PrefixStore):
        below = below.underlying_store
    if isinstance(below, TCPStore):
        return TCPStore(below.host, below.port, is_master=False, wait_for_workers=False, timeout=_CALL_TIMEOUT)
    return store

"""The job's store, as the guard of one rank uses it, and the keys under which ranks publish their records.

It needs torch's Store methods ``set``, ``get``, ``check``, ``add`` and ``compare_set``. Only keys that ``check`` has
found are read, because ``get`` waits for a missing key.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatron_pp.comm.stores import private_client
from megatron_pp.faults.store.records import FAILED, TICKETS, Entry, Process, Progress, Record, decode, encode

if TYPE_CHECKING:
    from megatron_pp.faults.store.failures import Failure

_ROOT = "megatron_pp"


@dataclass(eq=False)
class FaultStore:
    """One rank's access. All methods may block as long as the network does: call them from the heartbeat thread.

    pipeline      name of the pipeline group, the same on its members and different from other groups', also from those
                  over the same ranks
    rank, size    within the pipeline group
    global_rank   this rank in the whole job
    members       the pipeline's ranks, as global ranks
    began         when this rank began the pipeline's first step, by the monotonic clock of its ``process``

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
    began: float = 0.0
    process: Process = dataclasses.field(default_factory=Process)

    def __post_init__(self) -> None:
        self.store = private_client(self.store)
        self._batched = bool(getattr(self.store, "has_extended_api", bool)())
        ranks = "-".join(map(str, self.members)) or self.pipeline
        made = self.store.add(f"{_ROOT}/made over {ranks}/{self.global_rank}", 1)
        nth = self.store.add(f"{_ROOT}/made {self.pipeline}/{self.global_rank}", 1)
        self._life = f"{_ROOT}/life {nth} of {self.pipeline}"
        self.epoch = int(self.store.compare_set(f"{self._life}/epoch", "", str(made)))
        self.tickets_before = self.store.add(self.job_key(TICKETS), 0)
        self.store.set(
            self.own_key("began", self.rank), json.dumps([self.began, self.tickets_before, asdict(self.process)])
        )
        self._known: dict[str, set[int]] = {}

    def publish_failure(self, failure: Failure) -> None:
        """Publish ``failure`` to the job."""
        from megatron_pp.faults.store import failures

        failures.publish(self, failure)

    def read_failure(self) -> Failure | None:
        """The first error that a rank raised, or else the first failure published. One ``check`` if there is none."""
        if not self.store.check([self.job_key(FAILED)]):
            return None
        from megatron_pp.faults.store import failures

        return failures.read(self)

    def note_failure_read(self) -> None:
        """Note in the store that this rank has read the failure."""
        self.store.set(self.own_key("read", self.rank), "1")

    def have_read_failure(self) -> set[int]:
        """The ranks of the pipeline that have read a failure."""
        return {rank for rank in range(self.size) if self.store.check([self.own_key("read", rank)])}

    def publish(self, record: Progress | Entry) -> None:
        """Replace this rank's last record of that type."""
        self.store.set(self.own_key(type(record).__name__, self.rank), encode(record))

    def read_all(self, kind: type[Record]) -> dict[int, Record]:
        """The newest record of type ``kind``, Progress or Entry, of every rank that has one."""
        known = self._known.setdefault(kind.__name__, set())
        for rank in range(self.size):
            if rank not in known and self.store.check([self.own_key(kind.__name__, rank)]):
                known.add(rank)
        ranks = sorted(known)
        keys = [self.own_key(kind.__name__, rank) for rank in ranks]
        values = self.store.multi_get(keys) if self._batched and keys else [self.store.get(key) for key in keys]
        return {rank: decode(kind, value) for rank, value in zip(ranks, values, strict=True)}

    def job_key(self, name: str) -> str:
        """The key of ``name`` for the whole job."""
        return f"{_ROOT}/{self.epoch}/{name}"

    def own_key(self, what: str, rank: int) -> str:
        """The key of ``what`` for ``rank`` of the pipeline."""
        return f"{self._life}/{what}/{rank}"

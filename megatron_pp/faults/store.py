"""The keys in the store through which the ranks of a job tell each other where they are and what failed.

Any object with torch's Store methods ``set``, ``get``, ``check``, ``add`` and ``compare_set`` will do (TCPStore,
PrefixStore, HashStore, FileStore). A call on a TCPStore blocks while another thread's ``get`` or ``wait`` on the same
client does, so the board has a client of its own; it never asks for a key before ``check`` has found it, since ``get``
on a missing key waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

from megatron_pp.faults.records import EXCEPTION, Entry, Failure, Progress, decode, encode

_ROOT = "megatron_pp"
_ANSWER_TIME = timedelta(seconds=30)

Record = TypeVar("Record", Progress, Entry, Failure)


class Board:
    """One rank's access. All methods talk to the store and may block as long as its network does: call them from the
    link's thread.

    pipeline      name of the pipeline group, the same on its members and different from other groups', also from those
                  over the same ranks
    rank, size    within the pipeline group
    global_rank   number of this rank in the whole job
    members       the pipeline's ranks, as numbers in the whole job

    Failures are visible in the whole job, not only in the pipeline: tensor- and data-parallel partners of a failed
    pipeline would hang as well. The epoch keeps what is left in the store from before a re-initialisation out of
    sight. It counts how often boards over these ranks were made, not how many boards a rank has made: a rank may be in
    more pipelines than its partners, one after the other. Ranks that run several pipelines over the same ranks in
    threads may make their boards in different orders; so the first member to make one says which epoch it belongs to.
    """

    def __init__(
        self, store: Any, pipeline: str, rank: int, size: int, global_rank: int, members: Iterable[int] = ()
    ) -> None:
        self.store = private_client(store)
        self.pipeline = pipeline
        self.rank = rank
        self.size = size
        self.global_rank = global_rank
        self.members = tuple(members)
        self._batched = bool(getattr(self.store, "has_extended_api", bool)())
        self.renew()

    def renew(self) -> None:
        """Begin a new epoch: forget what was told before. Every rank of the job has to."""
        ranks = "-".join(map(str, self.members)) or self.pipeline
        made = self.store.add(f"{_ROOT}/made over {ranks}/{self.global_rank}", 1)
        nth = self.store.add(f"{_ROOT}/made {self.pipeline}/{self.global_rank}", 1)
        self._life = f"{_ROOT}/life {nth} of {self.pipeline}"
        self.epoch = int(self.store.compare_set(f"{self._life}/epoch", "", str(made)))
        self._before = self.store.add(self._job("tickets"), 0)
        self._known: dict[str, set[int]] = {}

    # -- failures ------------------------------------------------------------------------------------------------------

    def announce(self, failure: Failure) -> None:
        """Tell the job. Readers see the record before they see that there is one."""
        ticket = self.store.add(self._job("tickets"), 1)
        self.store.set(self._job(f"failure/{ticket}"), encode(failure))
        self.store.set(self._job("failed"), "1")

    def failure(self) -> Failure | None:
        """What failed: the first error that a rank raised, or else the first report. One ``check`` where nothing
        did."""
        if not self.store.check([self._job("failed")]):
            return None
        found = []
        for ticket in range(1, self.store.add(self._job("tickets"), 0) + 1):
            key = self._job(f"failure/{ticket}")
            if self.store.check([key]):
                failure = decode(Failure, self.store.get(key))
                if self._concerns(failure, ticket):
                    found.append(failure)
        return min(found, key=lambda failure: failure.kind != EXCEPTION, default=None)

    def _concerns(self, failure: Failure, ticket: int) -> bool:
        """A member that told of a failure in another pipeline and then went on to this one has dealt with it."""
        past = ticket <= self._before and failure.global_rank in self.members
        return failure.pipeline == self.pipeline or not past

    # -- progress and entry --------------------------------------------------------------------------------------------

    def publish(self, record: Progress | Entry) -> None:
        """Put this rank's record in the place of its last one."""
        self.store.set(self._own(type(record).__name__, self.rank), encode(record))

    def progress(self) -> dict[int, Progress]:
        """The newest progress record of every rank that has one."""
        return self._read_all(Progress)

    def entries(self) -> dict[int, Entry]:
        """The newest entry record of every rank that has one."""
        return self._read_all(Entry)

    def _read_all(self, kind: type[Record]) -> dict[int, Record]:
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
    """A client of the same store with a connection of its own, where the kind of store has connections."""
    clone = getattr(store, "clone", None)
    if clone is not None:
        return clone()
    return _second_connection(store)  # older versions of torch


def _second_connection(store: Any) -> Any:
    from torch.distributed import PrefixStore, TCPStore

    below = store
    while isinstance(below, PrefixStore):
        below = below.underlying_store
    if isinstance(below, TCPStore):
        return TCPStore(below.host, below.port, is_master=False, wait_for_workers=False, timeout=_ANSWER_TIME)
    return store

"""Why ranks leave their step, as they publish it in the job's store. Loaded where a rank fails, or looks for causes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from megatron_pp.faults.records import FAILED, TICKETS, Process, RecordError, decode, encode

if TYPE_CHECKING:
    from megatron_pp.faults.fault_store import FaultStore

EXCEPTION = "exception"  # a rank raised an error of its own
MISMATCH = "mismatch"  # ranks entered a step with different plans or shapes
STALL = "stall"  # a rank died or stopped, or no rank makes progress
KINDS = (EXCEPTION, MISMATCH, STALL)


@dataclass(frozen=True)
class Failure:
    """Why all ranks leave their step."""

    kind: str  # EXCEPTION, MISMATCH or STALL
    pipeline: str  # name of the pipeline group in which it happened
    rank: int  # pipeline rank that reports it: the one that raised; for a stall the one that detected it
    global_rank: int  # its rank in the whole job
    instruction: str = ""  # as printed, such as F0.3; empty if it was outside the plan
    where: str = ""  # the same in words
    exception_type: str = ""  # qualified name
    message: str = ""  # of the exception, mismatch or stall
    traceback_tail: str = ""  # last lines
    suspects: tuple[int, ...] = ()  # of a stall: pipeline ranks that do not respond, or hold the others up
    field: str = ""  # what differs
    values: dict[str, str] = dataclasses.field(default_factory=dict)  # by pipeline rank: what it has, or where it was
    at: float = 0.0  # when, by the monotonic clock of its process
    process: Process = dataclasses.field(default_factory=Process)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RecordError(f"Failure.kind is {self.kind!r}; it is one of {', '.join(KINDS)}")


def publish(store: FaultStore, failure: Failure) -> None:
    """Publish it to the job. Readers see the record before they see that there is one."""
    ticket = store.store.add(store.job_key(TICKETS), 1)
    store.store.set(store.job_key(f"failure/{ticket}"), encode(failure))
    store.store.set(store.job_key(FAILED), "1")


def read(store: FaultStore) -> Failure | None:
    """The first error that a rank raised, or else the first failure published."""
    found = []
    for ticket in range(1, store.store.add(store.job_key(TICKETS), 0) + 1):
        key = store.job_key(f"failure/{ticket}")
        if store.store.check([key]):
            failure = decode(Failure, store.store.get(key))
            if failure.pipeline == store.pipeline or not _is_handled(store, failure, ticket):
                found.append(failure)
    return min(found, key=lambda failure: failure.kind != EXCEPTION, default=None)


def _is_handled(store: FaultStore, failure: Failure, ticket: int) -> bool:
    """Whether a member published it in another pipeline and then went on to this one: by its process's own clock,
    as the store is called some time after a step has begun; by what it found when it came if that is another
    process (a job that is started anew may have the same store); while it is not here, by what this rank found."""
    if failure.global_rank not in store.members:
        return False
    key = store.own_key("began", store.members.index(failure.global_rank))
    at, before, process = (
        json.loads(store.store.get(key)) if store.store.check([key]) else (0, store.tickets_before, None)
    )
    return failure.at < at if asdict(failure.process) == process else ticket <= before

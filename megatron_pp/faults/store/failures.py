"""The record of a failure, which ranks publish in the job's store. Loaded if a rank fails or looks for causes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from megatron_pp.faults.store.records import FAILED, TICKETS, Process, RecordError, decode, encode

if TYPE_CHECKING:
    from megatron_pp.faults.store.fault_store import FaultStore

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
    where: str = ""  # the instruction in words
    exception_type: str = ""  # qualified name
    message: str = ""  # of the exception, mismatch or stall
    traceback_tail: str = ""  # last lines of the traceback
    suspects: tuple[int, ...] = ()  # for a stall: pipeline ranks that do not respond, or for which the others wait
    field: str = ""  # for a mismatch: the field that differs
    values: dict[str, str] = dataclasses.field(default_factory=dict)  # pipeline rank -> its value, or its position
    at: float = 0.0  # time of the failure, by the monotonic clock of its process
    process: Process = dataclasses.field(default_factory=Process)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RecordError(f"Failure.kind is {self.kind!r}; it is one of {', '.join(KINDS)}")


def publish(store: FaultStore, failure: Failure) -> None:
    """Publish ``failure`` to the job. The record is written before the key that announces it."""
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
    """Whether a member published ``failure`` in another pipeline and then went on to this one. The clock of its process
    decides, because the store is called some time after a step has begun. For another process (a restarted job may
    have the same store) what the member found when it came decides, or what this rank found if it has not come yet."""
    if failure.global_rank not in store.members:
        return False
    key = store.own_key("began", store.members.index(failure.global_rank))
    at, before, process = (
        json.loads(store.store.get(key)) if store.store.check([key]) else (0, store.tickets_before, None)
    )
    return failure.at < at if asdict(failure.process) == process else ticket <= before

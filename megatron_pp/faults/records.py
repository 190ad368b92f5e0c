"""What ranks publish in the job's store, as JSON: where they are, what they entered a step with, and what failed; and
under which keys.

Needed are torch's Store methods ``set``, ``get``, ``check``, ``add`` and ``compare_set``. Only keys that ``check`` has
found are read, since ``get`` waits for a missing key.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from megatron_pp.comm.stores import private_client
from megatron_pp.errors import MegatronPPError

MAX_RECORD_BYTES = 1 << 20
MAX_TEXT = 20_000
_ROOT = "megatron_pp"

IN_STEP = "in_step"
ENTERING = "entering"
AFTER = "after"  # between steps, where that is watched
DONE = "done"
NO_HOST = -1

EXCEPTION = "exception"  # a rank raised an error of its own
MISMATCH = "mismatch"  # ranks entered a step with different plans or shapes
STALL = "stall"  # a rank died or stopped, or no rank makes progress
KINDS = (EXCEPTION, MISMATCH, STALL)


class RecordError(MegatronPPError, ValueError):
    """Bytes from the store are not a record."""


@dataclass(frozen=True)
class Process:
    host: str = ""  # machine and process namespace
    pid: int = 0
    started: int = 0  # the kernel's start time: detects a reused pid


@dataclass(frozen=True)
class Progress:
    step: int  # counted from 1
    state: str  # ENTERING, IN_STEP, AFTER or DONE
    position: int = 0  # index of the current instruction in its program
    text: str = ""  # that instruction, as printed, or what the rank does outside the plan
    idle: float = 0.0  # seconds since its position changed, at the time of writing and by its own clock
    beat: int = 0  # grows with every record: shows readers that the writer is alive
    process: Process = dataclasses.field(default_factory=Process)
    history: tuple[int, ...] = ()  # the agreements between the ranks that it used, by step; see ``consistency.py``
    number: str = ""  # the program's number of the step; see ``consistency.py``
    host: int = NO_HOST  # where the host runs ahead: instructions of ``step`` that it has issued; see ``Tracker.host``
    host_idle: float = 0.0  # seconds for which neither the host nor the device was seen to do anything


@dataclass(frozen=True)
class Entry:
    """What a rank entered a step with: field name -> value as text."""

    step: int
    description: dict[str, str]
    process: Process = dataclasses.field(default_factory=Process)


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


Record = TypeVar("Record", Progress, Entry, Failure)


def encode(record: Progress | Entry | Failure) -> str:
    """The record as JSON; long texts are cut in the middle."""
    return json.dumps({name: cut(value) if isinstance(value, str) else value for name, value in asdict(record).items()})


def decode(kind: type[Record], data: bytes | str) -> Record:
    """The record of type ``kind`` in ``data``. Raises RecordError."""
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"a record of {len(data)} bytes; at most {MAX_RECORD_BYTES} are read")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}") from None
    return _build(kind, content)


def _build(kind: Any, content: object) -> Any:
    if not isinstance(content, dict):
        raise RecordError(f"a {kind.__name__} record is a JSON object, not a {type(content).__name__}")
    known = {f.name: f for f in fields(kind)}
    unknown = sorted(set(content) - set(known))
    if unknown:
        raise RecordError(f"a {kind.__name__} record has no field {unknown[0]!r}")
    try:
        return kind(**{name: _checked(kind, name, str(known[name].type), value) for name, value in content.items()})
    except TypeError as error:
        raise RecordError(f"{kind.__name__}: {error}") from None


def _checked(kind: Any, name: str, declared: str, value: object) -> object:
    """``value``, if it is what the field is declared to hold."""
    if declared == "Process":
        return _build(Process, value)
    if name == "kind" and value not in KINDS:
        raise RecordError(f"{kind.__name__}.kind is {value!r}; it is one of {', '.join(KINDS)}")
    if not _FITS[declared](value):
        raise RecordError(f"{kind.__name__}.{name} is {str(value)[:40]!r}; it must be {declared}")
    return tuple(value) if isinstance(value, list) else value


def _is_int(value: object) -> bool:
    return type(value) is int  # no bool


_FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": _is_int,
    "float": lambda value: isinstance(value, float) or _is_int(value),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
    "tuple[int, ...]": lambda value: isinstance(value, list) and all(map(_is_int, value)),
}


def cut(text: str) -> str:
    """``text``, without its middle where it is long."""
    half = MAX_TEXT // 2
    return f"{text[:half]} [...] {text[-half:]}" if len(text) > MAX_TEXT else text


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
        self._before = self.store.add(self._job("tickets"), 0)
        self.store.set(self._own("began", self.rank), json.dumps([self.began, self._before, asdict(self.process)]))
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
                if failure.pipeline == self.pipeline or not self._is_handled(failure, ticket):
                    found.append(failure)
        return min(found, key=lambda failure: failure.kind != EXCEPTION, default=None)

    def _is_handled(self, failure: Failure, ticket: int) -> bool:
        """Whether a member published it in another pipeline and then went on to this one: by its process's own clock,
        as the store is called some time after a step has begun; by what it found when it came if that is another
        process (a job that is started anew may have the same store); while it is not here, by what this rank found."""
        if failure.global_rank not in self.members:
            return False
        key = self._own("began", self.members.index(failure.global_rank))
        at, before, process = json.loads(self.store.get(key)) if self.store.check([key]) else (0, self._before, None)
        return failure.at < at if asdict(failure.process) == process else ticket <= before

    def note_read(self) -> None:
        """This rank has read a failure, and needs the store no more for it."""
        self.store.set(self._own("read", self.rank), "1")

    def have_read(self) -> set[int]:
        """The ranks of the pipeline that have read a failure."""
        return {rank for rank in range(self.size) if self.store.check([self._own("read", rank)])}

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

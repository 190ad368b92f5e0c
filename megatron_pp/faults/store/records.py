"""The records that ranks publish in the job's store, as JSON: their progress, and what they entered a step with.

``failures.py`` has the record of a failure, ``fault_store.py`` the store.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from megatron_pp.errors import MegatronPPError

MAX_RECORD_BYTES = 1 << 20
MAX_TEXT = 20_000

IN_STEP = "in_step"
ENTERING = "entering"
AFTER = "after"  # between steps, if that time is watched
DONE = "done"
NO_HOST = -1

FAILED, TICKETS = "failed", "tickets"
"""Keys of the job: whether anything has failed, and how many failures were published."""


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
    """The description with which a rank entered a step: field name -> value as text."""

    step: int
    description: dict[str, str]
    process: Process = dataclasses.field(default_factory=Process)


Record = TypeVar("Record")


def encode(record: Any) -> str:
    """A Progress, an Entry or a Failure as JSON; long texts are cut in the middle."""
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
    """``value``, if it has the field's type. Raises RecordError."""
    if declared == "Process":
        return _build(Process, value)
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
    """``text``; if it is long, without its middle."""
    half = MAX_TEXT // 2
    return f"{text[:half]} [...] {text[-half:]}" if len(text) > MAX_TEXT else text

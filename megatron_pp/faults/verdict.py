"""From an exception to a record of it, and from a record to the error that other ranks raise."""

from __future__ import annotations

import traceback

from megatron_pp.errors import (
    P2PError,
    P2PShapeError,
    P2PTypeError,
    PipelineError,
    PipelineMismatchError,
    PipelinePeerError,
    PipelineStallError,
    WireMismatchError,
)
from megatron_pp.faults.records import EXCEPTION, MISMATCH, STALL, Failure


def error_of(failure: Failure, pipeline: str, rank: int, here: str) -> PipelineError:
    """What ``rank`` of ``pipeline`` raises because of ``failure``; ``here`` says what it does itself."""
    if failure.kind == STALL:
        message = failure.message
        if (failure.pipeline, failure.rank) != (pipeline, rank):
            finder = f"rank {failure.rank}" + (
                "" if failure.pipeline == pipeline else f" of pipeline {failure.pipeline}"
            )
            message = f"{message}\n(found by {finder}; {here})"
        return PipelineStallError(message, suspects=failure.suspects, progress=_lines(failure.message))
    if failure.kind == MISMATCH:
        values = {int(r): value for r, value in failure.values.items() if r.isdigit()}
        return PipelineMismatchError(failure.message, field=failure.field, values=values)
    return PipelinePeerError(
        _peer_message(failure, pipeline),
        rank=failure.rank,
        instruction=failure.instruction,
        exception_type=failure.exception_type,
        message=failure.message,
        traceback_tail=failure.traceback_tail,
    )


def first_line(failure: Failure | None) -> str:
    """The failure in one line, for a log."""
    if failure is None:
        return "an error ended its last step"
    text = f"{failure.exception_type}: {failure.message}" if failure.kind == EXCEPTION else failure.message
    return f"rank {failure.rank}: {text.splitlines()[0] if text else failure.kind}"


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` says that a transfer failed, rather than why: the reason is to be looked for elsewhere."""
    if isinstance(error, P2PError):
        return not isinstance(error, (P2PTypeError, P2PShapeError, WireMismatchError))
    if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS_OF_A_LOST_CONNECTION)


# What gloo and NCCL write where a connection ends; from collectives that a user's model runs, for one.
_SIGNS_OF_A_LOST_CONNECTION = (
    "Connection closed by peer",
    "pair closure",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Read error",
    "NCCL communicator was aborted",
    "NCCL error",
)


def type_name(error: BaseException) -> str:
    """The exception's class as a traceback shows it."""
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def tail_of(error: BaseException) -> str:
    """The last lines of the exception's traceback."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines()
    return "\n".join(lines[-12:])


def _peer_message(failure: Failure, own_pipeline: str) -> str:
    who = f"pipeline rank {failure.rank} (global rank {failure.global_rank})"
    if failure.pipeline != own_pipeline:
        who += f" of pipeline {failure.pipeline}"
    at = failure.where + (f" ({failure.instruction})" if failure.instruction else "")
    head = f"{who} raised {failure.exception_type} in {at}: {failure.message}"
    if not failure.traceback_tail:
        return head
    tail = "\n".join(f"    {line}" for line in failure.traceback_tail.splitlines())
    return f"{head}\n  there:\n{tail}"


def _lines(message: str) -> dict[int, str]:
    """The line per rank in a stall's message."""
    _, _, rest = message.partition("Where each rank was:\n")
    listed, _, _ = rest.partition("\nBeside the plan:")
    found: dict[int, str] = {}
    for line in listed.splitlines():
        head, colon, text = line.strip().partition(": ")
        if colon and head.startswith("rank ") and head[5:].isdigit():
            found[int(head[5:])] = text
    return found

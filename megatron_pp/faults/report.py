"""From the record of a failure to the error that other ranks raise."""

from __future__ import annotations

from megatron_pp.errors import PipelineError, PipelineMismatchError, PipelinePeerError, PipelineStallError
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

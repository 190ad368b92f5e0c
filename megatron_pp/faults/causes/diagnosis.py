"""Writes the text of errors: what each rank waits for, its last position, and the instructions around it.

Exceptions of user code may raise when they are inspected; such errors are caught here. No decision depends on the text
of a user's exception.
"""

import dis
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from torch.distributed import DistError

from megatron_pp import errors
from megatron_pp.faults.position.places import instruction_at, waits_on
from megatron_pp.faults.store import failures, records
from megatron_pp.faults.store.failures import Failure
from megatron_pp.faults.store.records import Progress, cut
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.instruction import Instruction
from megatron_pp.plan.ir.spec import Plan

_TRACEBACK_LINES = 12
# The place in gloo's source that raised the error; one kind of error has none. It may be anywhere in the text: in a
# future's callback, such as a communication hook of DDP, the name of the error comes before it.
_FROM_GLOO = re.compile(r"\[[^\]\n]*/gloo/[^\]\n]+:\d+\] |Application timeout caused pair closure")


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` only means that a transfer failed, without the cause. Our transport raises such errors, and so
    does a collective of torch.distributed, for example one of the user's model."""
    kind = type(error)
    if issubclass(kind, errors.P2PTransferError):
        return True
    if is_raised_by_python(error):
        return False
    return issubclass(kind, DistError) or (kind is RuntimeError and _FROM_GLOO.search(text_of(error)) is not None)


def is_raised_by_python(error: BaseException) -> bool:
    """Whether a ``raise`` statement raised ``error``, rather than a function written in C or C++."""
    last = traceback_of(error)
    if last is None:
        return True
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code.co_code
    at = last.tb_lasti
    return 0 <= at < len(code) and dis.opname[code[at]] in ("RAISE_VARARGS", "RERAISE")


def traceback_of(error: BaseException) -> TracebackType | None:
    """The traceback of ``error``, whatever its class makes of that attribute."""
    found: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    return found


def type_name(error: BaseException) -> str:
    """The exception's class as a traceback shows it."""
    kind = type(error)
    inner = ("builtins", "__main__")
    return _safely(
        lambda: kind.__qualname__ if kind.__module__ in inner else f"{kind.__module__}.{kind.__qualname__}",
        "an exception",
    )


def text_of(error: BaseException) -> str:
    """``str(error)``, cut to the length of a record."""
    return _safely(lambda: str(error), "(its __str__ raises)")


def tail_of(error: BaseException) -> str:
    """The last lines of the exception's traceback."""
    return _safely(
        lambda: "\n".join("".join(traceback.format_exception(error)).splitlines()[-_TRACEBACK_LINES:]),
        "(its traceback cannot be formatted)",
    )


def _safely(read: Callable[[], str], otherwise: str) -> str:
    """The result of ``read`` as a plain string of bounded length; ``otherwise`` if it raises."""
    try:
        return cut(str.__getitem__(read(), slice(None)))
    except BaseException:  # a user's __str__ may raise anything
        return otherwise


_BEFORE, _AFTER = 6, 3
_WORDS = {
    ins.WAIT_F: "waits for the activation of {where} from rank {peer}",
    ins.WAIT_B: "waits for the gradient of {where} from rank {peer}",
    ins.FREE_F: "waits for rank {peer} to receive the activation of {where}",
    ins.FREE_B: "waits for rank {peer} to receive the gradient of {where}",
}


def doing(at: Instruction) -> str:
    """What a rank does in ``at``, described: ``waits for the activation of chunk 1, microbatch 3 from rank 1``."""
    if at.op in _WORDS:
        return _WORDS[at.op].format(where=at.where, peer=at.peer)
    if at.op in ins.SEND_OPS:
        return f"is in {at.name} to rank {at.peer}"
    if at.op in ins.RECV_OPS:
        return f"is in {at.name} from rank {at.peer}"
    return f"is in {at.name}"


def _reported_at(plan: Plan | None, rank: int, progress: Progress) -> Instruction | None:
    """The instruction of ``plan`` at which ``progress`` is; None if it is at none, or at that of another plan."""
    at = instruction_at(plan, rank, progress.position) if plan is not None else None
    return at if at is not None and str(at) == progress.text else None


def progress_line(plan: Plan | None, rank: int, progress: Progress | None, idle: float | None) -> str:
    """The last position of ``rank`` in one line. ``idle``: seconds since its position changed, None if unknown."""
    if progress is None:
        return "has not reported since this rank began to poll it"
    ago = "" if idle is None else f" {max(idle, 0.0):.1f} s ago"
    when = ago and f",{ago}"
    if progress.state == records.DONE:
        return f"finished step {progress.step}{when}"
    if progress.state == records.AFTER:
        return f"finished step {progress.step}{when}; is in {progress.text}"
    if progress.state == records.ENTERING:
        return f"entered step {progress.step}{when}; compares plans with the others"
    at = _reported_at(plan, rank, progress)
    if plan is None or at is None:
        return f"step {progress.step}, {progress.text or 'no instruction'}; last moved{ago}"
    place = f"{at}, instruction {progress.position + 1} of {len(plan.programs[rank])}"
    host = instruction_at(plan, rank, progress.host)
    ahead = f", its host in {host}" if host is not None and progress.host > progress.position else ""
    return f"step {progress.step}, {doing(at)} ({place}{ahead}); last moved{ago}"


def busy_ranks(plan: Plan, where: Mapping[int, Progress]) -> tuple[int, ...]:
    """Ranks that compute: if no rank moves, the others wait for these. A rank that has finished its program is not one
    of them, because it may wait in a collective for a rank of another pipeline."""
    at = {rank: _reported_at(plan, rank, progress) for rank, progress in sorted(where.items())}
    return tuple(rank for rank, one in at.items() if one is not None and one.op in ins.COMPUTE_OPS)


def working_ranks(plan: Plan | None, where: Mapping[int, Progress]) -> tuple[int, ...]:
    """Ranks that compute or run user code, in the plan or after it, and are not in a transfer."""
    at = {rank: _reported_at(plan, rank, progress) for rank, progress in sorted(where.items())}
    return tuple(r for r, one in at.items() if where[r].state == records.IN_STEP and (one is None or not waits_on(one)))


def around_positions(plan: Plan, positions: Mapping[int, int]) -> str:
    """Each rank's program around its position, the current instruction between ``>`` and ``<``."""
    return "\n".join(f"rank {rank}: {_window(plan.programs[rank], at)}" for rank, at in sorted(positions.items()))


def _window(program: Sequence[Instruction], position: int) -> str:
    start, stop = max(0, position - _BEFORE), min(len(program), position + 1 + _AFTER)
    words = [f">{at}<" if k == position else str(at) for k, at in enumerate(program[start:stop], start)]
    return " ".join((["..."] if start > 0 else []) + words + (["..."] if stop < len(program) else []))


Seen = Mapping[int, tuple[Progress, float]]  # other rank -> its progress, and seconds since its position changed


def progress_lines(rank: int, plan: Plan | None, own: Progress, seen: Seen, size: int) -> dict[int, str]:
    """``progress_line`` of every rank of the pipeline; ``rank`` is this one."""
    where = {**seen, rank: (own, own.idle)}
    return {r: progress_line(plan, r, *where.get(r, (None, None))) for r in range(size)}


def stall_text(rank: int, plan: Plan | None, own: Progress, seen: Seen, size: int, why: str) -> str:
    """The message of a PipelineStallError."""
    lines = progress_lines(rank, plan, own, seen, size)
    head = f"pipeline stalled: {why}. {_headline(rank, plan, own, seen)}".rstrip()
    parts = [head, "Last position of each rank:", *(f"  rank {r}: {line}" for r, line in lines.items())]
    where = {**{r: p for r, (p, _) in seen.items()}, rank: own}
    positions = {r: p.position for r, p in where.items() if p.state == records.IN_STEP and p.step == own.step}
    if plan is not None and positions:
        parts.append("Programs around these positions (> < marks the current instruction):")
        parts += [f"  {line}" for line in around_positions(plan, positions).splitlines()]
    return "\n".join(parts)


def _headline(rank: int, plan: Plan | None, own: Progress, seen: Seen) -> str:
    """``rank 2 waits for the activation of chunk 1, microbatch 3 from rank 1, which last reported forward of ..., 41 s
    ago``."""
    at = _reported_at(plan, rank, own)
    if plan is None or at is None:
        return f"rank {rank}: {own.text}" if own.text else ""
    text = f"rank {rank} {doing(at)}"
    for peer in waits_on(at):
        if peer not in seen:
            text += f", which has not reported (rank {peer})"
            continue
        progress, idle = seen[peer]
        last = instruction_at(plan, peer, progress.position)
        ended = progress.state in (records.AFTER, records.DONE)
        where = f"the end of step {progress.step}" if ended else last.name if last else progress.text
        step = "" if progress.step == own.step or ended else f" in step {progress.step}"
        text += f", which last reported {where}{step}, {max(idle, 0.0):.1f} s ago"
    return text


def error_of(failure: Failure, pipeline: str, rank: int, here: str) -> errors.PipelineError:
    """The error that ``rank`` of ``pipeline`` raises because of ``failure``. ``here``: what this rank does itself."""
    elsewhere = "" if failure.pipeline == pipeline else f" of pipeline {failure.pipeline}"
    values = {int(r): value for r, value in failure.values.items() if r.isdigit()}
    if failure.kind == failures.STALL:
        text = failure.message
        if elsewhere or failure.rank != rank:
            text += f"\n(detected by rank {failure.rank}{elsewhere}; {here})"
        return errors.PipelineStallError(text, suspects=failure.suspects, progress=values)
    if failure.kind == failures.MISMATCH:
        text = failure.message + (f"\n(found by rank {failure.rank}{elsewhere}; {here})" if elsewhere else "")
        return errors.PipelineMismatchError(text, field=failure.field, values=values)
    at = failure.where + (f" ({failure.instruction})" if failure.instruction else "")
    text = f"pipeline rank {failure.rank} (global rank {failure.global_rank}){elsewhere} raised "
    text += f"{failure.exception_type} in {at}: {failure.message}"
    if failure.traceback_tail:
        lines = failure.traceback_tail.splitlines()
        text += "\n".join([f"\n  The traceback on rank {failure.rank} ends with:", *(f"    {line}" for line in lines)])
    return errors.PipelinePeerError(
        text,
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
    text = f"{failure.exception_type}: {failure.message}" if failure.kind == failures.EXCEPTION else failure.message
    return f"rank {failure.rank}: {text.splitlines()[0] if text else failure.kind}"

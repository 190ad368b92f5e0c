"""The error of an output or gradient that was written to while it was being sent."""

from megatron_pp.comm.failed_transfers import written_to
from megatron_pp.errors import SendBufferError
from megatron_pp.plan.ir import instruction as ins
from megatron_pp.plan.ir.tasks import Task


def named(error: SendBufferError, at: Task, rank: int, now: str) -> SendBufferError:
    """``error`` of the send that ``at`` finishes, with what it is about; debug mode has named it. ``now``: the
    instruction that ``rank`` executes, as text."""
    if error.chunk >= 0:
        return error
    what = f"the {'output' if at.op == ins.FREE_F else 'input gradient'} of {at.instruction.where}"
    posted = str(at.instruction._replace(op=ins.POST_OF[at.op]))
    place = {"chunk": at.chunk, "microbatch": at.mb, "posted_by": posted, "broken_by": now}
    return written_to(rank, what, **place)

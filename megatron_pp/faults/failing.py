"""Runs if a step stalls or fails: finds the cause, tells other ranks, makes every transfer of this rank
fail, and decides which error the rank raises. Loaded when a rank fails, or has not moved for some time.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_pp.comm import abort, failed_transfers  # noqa: F401 (loaded now: later there may be no file to open)
from megatron_pp.errors import CommunicatorClosedError, PipelineError, PipelinePeerError
from megatron_pp.faults.causes import diagnosis, mutual_waits, positions, stall_detector
from megatron_pp.faults.causes.liveness import state_of
from megatron_pp.faults.consistency import Mismatch
from megatron_pp.faults.position import host_threads
from megatron_pp.faults.store.failures import EXCEPTION, MISMATCH, STALL, Failure
from megatron_pp.faults.store.records import AFTER, DONE, IN_STEP, Progress

if TYPE_CHECKING:
    from megatron_pp.faults.guard import FaultGuard
    from megatron_pp.faults.watchdog import Watchdog

logger = logging.getLogger("megatron_pp")

# Seconds.
_PUBLISHING = 3.0  # for a failed rank, until it stops waiting for the store to accept its record
_ANOTHER_READ = 1.0  # for the next read of a rank's record, before a finding about this rank is used
_LEASES = 1.25  # between a failure's publication and its effects on other ranks, in leases
_GRACE = 6.0  # for a rank whose transfer failed, to find the cause
_BEFORE_ESCALATION = 2.0  # after the communicator was aborted
_BEFORE_SHOWING_STACK = 5.0  # after that


class Failing:
    """The failing part of one guard, whose fields hold what is known of the failure. Both the thread of the step and
    the watchdog's thread call its methods."""

    def __init__(self, guard: FaultGuard) -> None:
        self.guard = guard
        self.escalate = guard.escalate
        self._warned_of: tuple[int, int, str] | None = None
        self._gone_since: dict[tuple[int, ...], float] = {}

    # -- the step of this rank ends --

    def leave_with(self, error: BaseException) -> None:
        """Handle ``error``, which was raised within the step. If the caller should see it, publish its record and
        return; otherwise raise the error that the caller should see in its place."""
        guard = self.guard
        if error is guard.raised:
            return  # an inner call has handled it
        if guard.over is not None and guard.failure is None:  # closed within the step, which is not watched since
            if diagnosis.is_consequence(error):
                _forget_contexts(error)
                raise CommunicatorClosedError(
                    f"pipeline rank {guard.rank}: this communicator was closed within its step, as by "
                    "close_communicators(); close it between steps"
                ) from error
            return
        # A RuntimeError of torch's may come from a group that was aborted.
        of_torch = type(error) is RuntimeError and not diagnosis.is_raised_by_python(error)
        if diagnosis.is_consequence(error) or (guard.failure is not None and of_torch):
            found = self._cause_of(error)
            _forget_contexts(error)
            # The failure here follows from one on another rank. Its own traceback would be printed first, so drop it.
            try:
                raise found from (None if isinstance(found, PipelinePeerError) else error)
            finally:
                del found  # its traceback leads to this frame
        guard.raised = error  # this rank is the cause
        content = {"exception_type": diagnosis.type_name(error), "traceback_tail": diagnosis.tail_of(error)}
        self.conclude(self._failure(EXCEPTION, diagnosis.text_of(error), **content), True)

    def end(self) -> None:
        """Called when the guard's last step has ended."""
        guard = self.guard
        if guard.over is None and guard.job_rank == 0:
            self._await_readers()
        guard.over = guard.over or diagnosis.first_line(guard.failure)
        guard.tracker.rest()

    def _cause_of(self, error: BaseException) -> PipelineError:
        """The error with the cause of a failed transfer: another rank's record, a process that is gone, or a rank
        without a heartbeat. If none is found within some seconds, the error says so."""
        reason = diagnosis.text_of(error).partition("\n")[0]
        failed = f"a transfer of rank {self.guard.rank} failed ({diagnosis.type_name(error)}: {reason})"
        self.guard.tracker.failed = failed
        guard, heartbeat = self.guard, self.guard.heartbeat
        heartbeat.poll_fast(True)
        with heartbeat.lock:
            heartbeat.lock.wait_for(lambda: guard.failure is not None, min(_GRACE, max(guard.timeout, 1.0) + 1.0))
        if guard.failure is None:
            here = guard.tracker.observe()
            assert here is not None
            with heartbeat.lock:
                ended = stall_detector.ended(heartbeat.peers, state_of)
            self.conclude(self._stall_failure(here, "; ".join([failed, *ended.values()]), tuple(ended)), True)
        heartbeat.poll_fast(False)
        return self.error()

    # -- no rank moves --

    def find_stall(self, here: Progress) -> Failure | None:
        """The stall, if there is one. This rank is at ``here`` and has not moved for some time, or one of its transfers
        failed. If there is no stall and others wait for this rank, it logs that its operation takes long."""
        guard, timeout = self.guard, self.guard.timeout
        with guard.heartbeat.lock:
            working: tuple[int, ...] = ()
            mutual: tuple[str, tuple[int, ...]] = ("", ())
            if here.idle >= timeout:
                everywhere = {**guard.progress_of_others(), guard.rank: here}
                working = diagnosis.working_ranks(self._plan(), everywhere)
                mutual = self._mutual_waits(everywhere, timeout if working else timeout / 2)
            where, failed = guard.tracker.where(), guard.tracker.failed
            step = here.step if where is None else where.step
            waits_on, between = positions.awaited_ranks(guard.tracker), here.state == AFTER
            own = stall_detector.OwnState(
                guard.rank, guard.size, step, here.idle, waits_on, failed, working, between, mutual
            )
            peers = guard.heartbeat.peers
            found = stall_detector.find_stall(peers, own, timeout, time.monotonic(), state_of, guard.patience)
            if found is not None and found.suspects and not own.failed and not self._confirmed(found.suspects):
                return None
        if found is None and guard.rank in working:
            self._warn_that_it_takes_long(here)
        if found is not None and mutual[0] and mutual[0] in found.why:
            # Logged now and not when it is raised, because the host may be in a call that no abort ends.
            logger.error("pipeline rank %d gives up its step: %s", guard.rank, found.why)
        return None if found is None else self._stall_failure(here, found.why, found.suspects)

    def _mutual_waits(self, everywhere: Mapping[int, Progress], seconds: float) -> tuple[str, tuple[int, ...]]:
        """The operations that have waited for each other's messages for ``seconds``, in words, and their ranks."""
        for place in positions.within_plans(self.guard.tracker) if self.guard.completed is not None else ():
            assert place.plan is not None
            found = mutual_waits.find(place.plan, place.step, everywhere, seconds)
            if found[1]:
                return found
        return "", ()

    def _confirmed(self, suspects: tuple[int, ...]) -> bool:
        """Whether peers were read, if possible, since these were suspected: a rank publishes its end before it ends."""
        now = time.monotonic()
        since = self._gone_since.setdefault(suspects, now)
        return self.guard.heartbeat.peers.read_at > since or now - since > _ANOTHER_READ

    def _plan(self) -> Any:
        where = self.guard.tracker.where()
        return None if where is None else where.plan

    def _warn_that_it_takes_long(self, here: Progress) -> None:
        """Warn once per operation, on the rank that runs it, with the place in the user's code."""
        operation = (here.step, here.position, here.text)
        if self._warned_of == operation:
            return
        self._warned_of = operation
        logger.warning(
            "pipeline rank %d has been in %s for %.0f s (config.p2p_timeout); the others wait, "
            "and give up after %.0f s (config.compute_timeout). Its stack:\n%s",
            self.guard.rank, positions.described(self.guard.tracker)[1], here.idle, self.guard.patience,
            host_threads.stacks(self.guard.caller),
        )  # fmt: skip

    # -- a failure is known --

    def mismatch(self, found: Mismatch) -> Failure:
        """The failure of ranks that have entered a step with different plans."""
        text = f"{found}{self._global_ranks(sorted(found.values))}"
        return self._failure(MISMATCH, text, field=found.field, values=_by_text(found.values))

    def conclude(self, failure: Failure, is_news: bool) -> None:
        """Settle on ``failure``, publish it if the others do not know it yet, and make every transfer here fail."""
        guard, heartbeat = self.guard, self.guard.heartbeat
        seconds = 0.0 if self._has_lost_store() else _PUBLISHING
        unknown = is_news and not heartbeat.publish(failure, seconds)
        with heartbeat.lock:
            # This finding may follow from a record that this rank has not read yet: a rank that publishes its error
            # ends, and others find that its process is gone.
            known = heartbeat.peers.failure
            guard.failure = guard.failure or (failure if known is None or failure.kind == EXCEPTION else known)
            heartbeat.peers.failure = known or guard.failure  # so the watch goes on, even if the store is gone
            guard.known_since = guard.known_since or time.monotonic()
            heartbeat.lock.notify_all()
        if unknown and guard.completed is not None and guard.escalate is not None:
            guard.escalate()  # before the pipeline's group: ranks that see no failure would reduce what its abort left
        self._abort()

    def _abort(self) -> None:
        """Abort transfers. If the host runs ahead, streams go on after an abort without the missing data, and may
        reduce wrong values with others. So it waits until no rank relies any more on having found no failure."""
        guard = self.guard
        if guard.completed is not None and guard.known_since is not None:
            lease = _LEASES * guard.heartbeat.pace.lease
            time.sleep(max(0.0, guard.known_since + lease - time.monotonic()))
        guard.abort()

    def _has_lost_store(self) -> bool:
        """Whether the store has failed, or has not answered, for so long that no further call is worth waiting for."""
        heartbeat = self.guard.heartbeat
        since = heartbeat.peers.broken_since or heartbeat.peers.asked_at
        return since is not None and time.monotonic() - since >= min(_PUBLISHING, 8 * heartbeat.pace.poll)

    def _await_readers(self) -> None:
        """Wait until ranks that are in a step have read the failure, for a lease at most. By default this process holds
        the store, which ends with the process."""
        heartbeat, pace = self.guard.heartbeat, self.guard.heartbeat.pace
        elsewhere = (self.guard.world_size or self.guard.size) > self.guard.size
        at_least = 2 * pace.poll if elsewhere else 0.0
        heartbeat.poll_fast(True)
        begun = time.monotonic()
        with heartbeat.lock:
            heartbeat.lock.wait_for(
                lambda: time.monotonic() - begun >= at_least and not self._unread(begun), _LEASES * pace.lease
            )

    def _unread(self, since: float) -> bool:
        """Whether some rank that was in a step after ``since`` has not read the failure yet, as far as is known."""
        peers = self.guard.heartbeat.peers
        if self.guard.heartbeat.closed or peers.broken:
            return False
        active = {rank for rank, peer in peers.seen.items() if peer.progress.state != DONE}
        return peers.failure is None or peers.read_at < since or not active <= peers.have_read

    def await_exit(self, watchdog: Watchdog) -> None:
        """Called in the watchdog's thread after the abort. Waits for this rank to leave its step, and uses stronger
        means if it does not."""
        if _left_within(watchdog, _BEFORE_ESCALATION):
            return
        if self.escalate is not None:
            self.escalate()
        if not _left_within(watchdog, _BEFORE_SHOWING_STACK):
            self._show_stack()
            _left_within(watchdog, math.inf)

    def _show_stack(self) -> None:
        """Log the stack of this rank, which hangs in code that cannot be interrupted."""
        _, place = positions.described(self.guard.tracker, of_host=True)
        logger.error(
            "pipeline rank %d has to leave its step (%s) but is still in %s:\n%s",
            self.guard.rank, diagnosis.first_line(self.guard.failure), place, host_threads.stacks(self.guard.caller),
        )  # fmt: skip

    def error(self) -> PipelineError:
        """The error that this rank raises now because of the failure."""
        error = self._new_error()
        self.guard.raised = error if self.guard.tracker.is_within else None
        return error

    def log(self, here: Progress) -> None:
        """Log a failure that was found between steps, at ``here``. The next step raises it."""
        logger.error("pipeline rank %d, %s: %s", self.guard.rank, here.text, self._new_error())

    def _new_error(self) -> PipelineError:
        guard = self.guard
        assert guard.failure is not None
        return diagnosis.error_of(guard.failure, guard.pipeline, guard.rank, positions.doing(guard.tracker))

    def _failure(self, kind: str, message: str, **content: Any) -> Failure:
        place = ("", "") if kind == MISMATCH else positions.described(self.guard.tracker, of_host=kind == EXCEPTION)
        who, process = (self.guard.pipeline, self.guard.rank, self.guard.job_rank), self.guard.tracker.process
        return Failure(kind, *who, *place, message=message, at=time.monotonic(), process=process, **content)

    def _stall_failure(self, here: Progress, why: str, suspects: tuple[int, ...]) -> Failure:
        now = time.monotonic()
        peers = self.guard.heartbeat.peers.seen.copy()  # its thread may add one
        seen = {rank: (peer.progress, now - peer.moved_at) for rank, peer in peers.items()}
        plan = self._plan()
        if plan is not None and not suspects:
            in_step = {r: p for r, (p, _) in {**seen, self.guard.rank: (here, 0.0)}.items() if p.state == IN_STEP}
            suspects = diagnosis.busy_ranks(plan, in_step)
            if suspects:
                why += f"; held up by rank {', '.join(map(str, suspects))}, which waits for no other rank"
        why += self._global_ranks(suspects)
        text = diagnosis.stall_text(self.guard.rank, plan, here, seen, self.guard.size, why)
        lines = diagnosis.progress_lines(self.guard.rank, plan, here, seen, self.guard.size)
        return self._failure(STALL, text, suspects=suspects, values=_by_text(lines))

    def _global_ranks(self, ranks: Sequence[int]) -> str:
        """The global ranks of ``ranks``, for a text that names these. Empty if the pipeline is the whole job."""
        guard = self.guard
        if not ranks or not guard.members or (guard.world_size or guard.size) <= guard.size:
            return ""
        return f" (global rank {', '.join(str(guard.members[rank]) for rank in ranks)})"


def _left_within(watchdog: Watchdog, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while watchdog.is_active() and not watchdog.closed:
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True


def _forget_contexts(error: BaseException) -> None:
    """Take the frames of the guard's contexts, which are generators, off the traceback of ``error``.

    Called where another error replaces it; contextlib does so only for an error that is raised again. Since Python 3.12
    such a frame leads to contextlib's, which holds the error: the tensors of its step would stay until a garbage
    collection."""
    left = diagnosis.traceback_of(error)
    while left is not None and left.tb_frame.f_code.co_flags & inspect.CO_GENERATOR:
        left = left.tb_next
    BaseException.with_traceback(error, left)


def _by_text(by_rank: Mapping[int, str]) -> dict[str, str]:
    return {str(rank): value for rank, value in by_rank.items()}

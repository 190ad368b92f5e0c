"""The fault guard that a pipeline step runs under: a failure of one rank becomes an error on all, instead of a hang.

``with guard.step(executor): ...`` costs a few assignments. Two threads sleep most of the time: the heartbeat publishes
this rank's position to the store and reads failures of others, the watchdog detects stalls. A rank that raises
publishes a record; the others read it within half a second and abort their communicators, so that their transfers
fail, and the guard replaces that error by one that reports the rank, the place and the cause.

A rank that has finished its step before another one fails is not disturbed until it enters its next step; it has
finished when its device has, where the host runs ahead. A failure that is found between the host's end of a step and
its next one is logged at once and raised by that. After a failure the guard and its communicator are closed; a program
that continues makes new ones, and new process groups.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_pp.comm.at_exit import call_if_alive
from megatron_pp.errors import CommunicatorClosedError, PipelineError, PipelinePeerError
from megatron_pp.faults import consistency
from megatron_pp.faults.heartbeat import Heartbeat, Pace
from megatron_pp.faults.liveness import state_of
from megatron_pp.faults.places import Source
from megatron_pp.faults.records import (
    AFTER,
    EXCEPTION,
    IN_STEP,
    MISMATCH,
    STALL,
    Entry,
    Failure,
    FaultStore,
    Progress,
)
from megatron_pp.faults.tracker import InstructionMarks, Outside, Tracker
from megatron_pp.faults.watchdog import Watchdog
from megatron_pp.on_demand import load

if TYPE_CHECKING:
    from megatron_pp.faults.device_events import CompletedWork

logger = logging.getLogger("megatron_pp")

# Seconds.
_PUBLISHING = 3.0  # that a rank which failed gives the store to accept its record
_ANOTHER_READ = 1.0  # that a finding about a rank waits for the next read of its record
_LEASES = 1.25  # between a failure's publication and what may follow from it on other ranks, in leases
_GRACE = 6.0  # that a rank whose transfer failed looks for the cause
_MOVING = 1.0  # since a rank's position changed: for as long it holds nobody up, nor is it held up

Describe = Callable[[], Mapping[str, str]]


@dataclass(eq=False)
class FaultGuard:
    """One per communicator, long-lived.

    store        any torch Store that all ranks of the pipeline share; see ``FaultStore``
    pipeline     name of the pipeline group; rank, size: within it
    timeout      seconds (``config.p2p_timeout``) without a heartbeat of a rank, or without any rank moving, after which
                 the step is given up; where a live rank computes all that time, it logs its stack then, and the step
                 is given up after ``patience`` (``config.compute_timeout``)
    abort        makes blocked and later transfers of this rank's communicator fail; called from another thread
    escalate     called if this rank does not leave its step after that: aborts all other groups (tensor- or
                 data-parallel) that it may be blocked in
    is_gone      whether the process group was destroyed: ends what is watched between steps
    completed    what the device has done, where ``wait`` does not block the host; ``marks`` then is an observer for the
                 engine
    global_rank, world_size, members   in the whole job; ``members``: the global ranks of the pipeline. By default the
                 pipeline is the job

    ``agreement`` is the number of what the ranks have agreed on for the current step: it distinguishes one plan's
    messages from another's."""

    store: Any
    pipeline: str
    rank: int
    size: int
    timeout: float
    abort: Callable[[], None]
    _: KW_ONLY
    escalate: Callable[[], None] | None = None
    is_gone: Callable[[], bool] = bool
    completed: CompletedWork | None = None
    global_rank: int | None = None
    world_size: int | None = None
    members: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.patience = self.timeout
        self._global_rank = self.rank if self.global_rank is None else self.global_rank
        self._tracker = Tracker(self.rank, self.size, self.completed)
        self.marks = None if self.completed is None else InstructionMarks(self._tracker)
        whose = self.pipeline, self.rank, self.size, self._global_rank, self.members
        connect = partial(FaultStore, self.store, *whose, time.monotonic(), self._tracker.process)
        self._heartbeat = Heartbeat(connect, Pace.of(self.timeout, self.world_size or self.size), self._tracker)
        self._watchdog = Watchdog(self._tracker, self._heartbeat, self._act, self.escalate, self._show_stack)
        # By this rank, and handled. Only within steps: its traceback has frames that hold a step's tensors.
        self._raised: BaseException | None = None
        self._main = 0
        self._followed_by = ""  # ``after`` of the last step, also when its watch has ended with the store
        self._warned_of: tuple[int, int, str] | None = None
        self._gone_since: dict[tuple[int, ...], float] = {}
        self.failure: Failure | None = None
        self.agreement = 0
        self._over: str | None = None
        self._entered_with: Hashable = None
        self._agreements = consistency.Agreements(self.size)
        self._number = consistency.StepNumber()
        self._known_since: float | None = None
        self._gate: Any = None
        if self.completed is not None:
            gate: WeakMethod[Callable[[], object]] = WeakMethod(self.before_update)
            self._gate = register_optimizer_step_pre_hook(lambda *step: call_if_alive(gate))

    @contextmanager
    def step(
        self,
        source: Source,
        key: Hashable = None,
        describe: Describe | None = None,
        number: int | None = None,
        phase: str = "",
        after: str = "",
    ) -> Iterator[FaultGuard]:
        """Around one step; ``source`` has its position. If ``key`` is new, ``describe()`` (field name -> value) is
        compared among all ranks before the step begins; if it was agreed on before, but not for the last step, the
        ranks check during the step that all have changed to the same. How the program's ``number`` of the step differs
        from the last one is part of the key. ``after``: what the program does with other ranks until the next step, in
        words; if given, dead peers and published failures are looked for until then, or until the guard is closed.

        Raises, entering or leaving: PipelinePeerError, PipelineStallError, PipelineMismatchError,
        CommunicatorClosedError after a failure. An error of this rank's own is raised as it is."""
        if self._over is not None:
            raise CommunicatorClosedError(
                f"pipeline rank {self.rank}: this communicator cannot be used any more: {self._over}"
            )
        self.raise_unreported()
        try:
            self._enter(source, key, describe, number, phase)
            yield self
            self._tracker.mark("the end of the step")
        except BaseException as error:
            self._leave(error)
            raise
        else:
            self._leave(None, after)

    def raise_unreported(self) -> None:
        """Raises the failure that was found since the last step, if no step has raised it."""
        if self.failure is not None and self._over is None:
            self._over = load("diagnosis").first_line(self.failure)
            self._tracker.rest()
            raise self._error()

    def watch(self, what: str) -> AbstractContextManager[FaultGuard]:
        """Around ``what`` a program does with other ranks between steps, such as an optimizer step, or around that and
        steps: failures are handled as in a step."""
        return self.step(Outside(), phase=what)

    def ended_by(self, error: BaseException) -> BaseException:
        """``error`` was raised between steps, where what follows a step is watched: it is handled as in a step, so that
        one of this rank's own is published, and of a failed transfer the cause is found. Returns what is to be raised
        in its place, ``error`` itself where this rank is the cause."""
        after = self._followed_by
        if not after or self._over is not None or threading.get_ident() != self._main or self.is_gone():
            return error
        traceback_of_it = error.__traceback__
        try:
            with self.step(Outside(), phase=after):
                raise error
        except BaseException as found:
            error.__traceback__ = traceback_of_it
            return found

    def check(self) -> None:
        """Raises the failure that ends this step, if there is one; for a rank that waits for something else than a
        transfer."""
        if self.failure is not None:
            raise self._error()

    def before_update(self) -> None:
        """Before an optimizer of this thread changes parameters, where the host runs ahead: return when the device has
        done all that was issued to the current stream, and no rank has published a failure. What was received, and
        what was reduced from it, is then what was sent.

        A rank aborts a lease and more after its failure was published (``_abort``). So a rank to whom an abort has
        sent what no peer computed finds that failure: what it read last is not older than a lease. Raises what
        ``step`` raises."""
        if self.completed is None or threading.get_ident() != self._main or self.is_gone():
            return
        heartbeat = self._heartbeat
        with self.step(Outside(), phase="the wait for transfers, before the optimizer", after=self._tracker.after):
            self.completed.synchronize()
            with heartbeat.lock:
                heartbeat.lock.wait_for(lambda: self.failure is not None or heartbeat.is_fresh())
                known = heartbeat.peers.failure
            if known is not None:
                self._conclude(known, False)

    def phase(self, text: str) -> None:
        """Name what this rank does after the plan, within the step."""
        self._tracker.phase = text

    def close(self, wait: bool = True) -> None:
        """``wait``: for the end of the threads."""
        self._over = self._over or "it was closed"
        if self._gate is not None:
            self._gate.remove()
        self._tracker.end()
        self._tracker.rest()
        self._watchdog.close(wait)
        self._heartbeat.close(wait)

    def _enter(self, source: Source, key: Hashable, describe: Describe | None, number: int | None, phase: str) -> None:
        self._main = threading.get_ident()
        move = self._number.move(number)
        key = (key, move)
        changed = describe is not None and key != self._entered_with
        known = self._agreements.use(key) if changed else 0
        shown = "" if number is None else str(number)
        self._tracker.begin(source, changed and not known, phase, known, shown)
        self._heartbeat.wake()
        self._watchdog.wake()
        if describe is None or not changed:
            return
        if known:
            self._heartbeat.asked_from = self._tracker.step
        else:
            # The number first: ranks in different steps differ in more.
            description = {consistency.MOVE: move, consistency.NUMBER: shown, **describe()}
            known = self._agreements.add(key, self._check_entry(description))
            self._tracker.agreed(known)
        self.agreement = known
        self._entered_with = key

    def _check_entry(self, description: dict[str, str]) -> dict[int, Mapping[str, str]]:
        """Compare plans with all ranks; what each entered with."""
        heartbeat, step = self._heartbeat, self._tracker.step
        entry = Entry(step, description, self._tracker.process)
        try:
            heartbeat.publish(entry, 0.0)
            with heartbeat.lock:
                heartbeat.lock.wait_for(
                    lambda: (
                        self.failure is not None
                        or self._mismatch(step) is not None
                        or len(consistency.arrived(heartbeat.peers.entries, step)) == self.size
                    )
                )
                mismatch = self._mismatch(step)
                entries = {**heartbeat.peers.entries, self.rank: entry}
            if self.failure is None and any(consistency.LAYERS in known.description for known in entries.values()):
                mismatch = mismatch or load("layer_order").find_mismatch(entries, step)
            if mismatch is not None:
                self._conclude(self._mismatch_failure(mismatch), True)
            if self.failure is not None:
                raise self._error()
        finally:
            heartbeat.poll_fast(False)
        return {rank: known.description for rank, known in entries.items() if known.step == step}

    def _mismatch(self, step: int) -> consistency.Mismatch | None:
        entries, progress = self._heartbeat.peers.entries, self._progress_of_others()
        return consistency.find_mismatch(self.rank, entries, progress, step, self._agreements)

    def _mismatch_failure(self, found: consistency.Mismatch) -> Failure:
        return self._new_failure(MISMATCH, str(found), field=found.field, values=_by_text(found.values))

    def _progress_of_others(self) -> dict[int, Progress]:
        return {rank: seen.progress for rank, seen in self._heartbeat.peers.seen.items()}

    def _leave(self, error: BaseException | None, after: str = "") -> None:
        """The step ended, with ``error`` or without; raises what the caller should see instead of it."""
        try:
            if error is None:
                if self.failure is not None:
                    raise self._error()
            elif error is self._raised:
                pass  # handled where it was raised, inside
            elif self._over is not None and self.failure is None:  # closed within the step, which is not watched since
                if load("diagnosis").is_consequence(error):
                    raise CommunicatorClosedError(
                        f"pipeline rank {self.rank}: this communicator was closed within its step, as by "
                        "close_communicators(); close it between steps"
                    ) from error
            elif load("diagnosis").is_consequence(error) or (
                # Perhaps of a group that was aborted.
                self.failure is not None
                and type(error) is RuntimeError
                and not load("diagnosis").is_raised_by_python(error)
            ):
                found = self._cause_of(error)
                # What failed here only follows from what happened on another rank: its traceback would come first.
                try:
                    raise found from (None if isinstance(found, PipelinePeerError) else error)
                finally:
                    del found  # its traceback leads to this frame
            else:  # this rank is the cause
                self._raised = error
                text, tail = load("diagnosis").text_of(error), load("diagnosis").tail_of(error)
                own = self._new_failure(
                    EXCEPTION, text, exception_type=load("diagnosis").type_name(error), traceback_tail=tail
                )
                self._conclude(own, True)
        finally:
            if error is not None or self.failure is not None:
                if self._over is None and self._global_rank == 0:
                    self._await_readers()
                self._over, after = self._over or load("diagnosis").first_line(self.failure), ""
                self._tracker.rest()
            self._tracker.end(after)
            self._followed_by = after
            if not self._tracker.is_within:
                self._raised = None

    def _cause_of(self, error: BaseException) -> PipelineError:
        """Why a transfer failed: another rank's record, a process that is gone, a rank without a heartbeat; or, found
        within some seconds, none of these."""
        reason = load("diagnosis").text_of(error).partition("\n")[0]
        failed = f"a transfer of rank {self.rank} failed ({load('diagnosis').type_name(error)}: {reason})"
        self._tracker.failed = failed
        heartbeat = self._heartbeat
        heartbeat.poll_fast(True)
        with heartbeat.lock:
            heartbeat.lock.wait_for(lambda: self.failure is not None, min(_GRACE, max(self.timeout, 1.0) + 1.0))
        if self.failure is None:
            here = self._tracker.observe()
            assert here is not None
            with heartbeat.lock:
                ended = load("stall_detector").ended(heartbeat.peers, state_of)
            self._conclude(self._stall_failure(here, "; ".join([failed, *ended.values()]), tuple(ended)), True)
        heartbeat.poll_fast(False)
        return self._error()

    def _act(self) -> bool:
        """For the watchdog: if there is a failure, make every transfer here fail. Returns whether there is one."""
        in_step = self._tracker.source is not None  # read first: once it fails, the step ends at any time
        known = self.failure or self._heartbeat.peers.failure
        here = self._tracker.observe()
        if here is None:
            return False
        if here.state == AFTER and self.is_gone():
            self._tracker.rest()
            return False
        failure = known or self._find_late_mismatch(here) or self._find_stall(here)
        if failure is not None:
            self._conclude(failure, known is None)
            if not in_step:
                logger.error("pipeline rank %d, %s: %s", self.rank, here.text, self._new_error())
        return failure is not None

    def _find_late_mismatch(self, here: Progress) -> Failure | None:
        """The ranks came back to different plans. Once all are seen to have changed to the same, polling ends."""
        heartbeat = self._heartbeat
        if not heartbeat.peers.seen:
            return None
        with heartbeat.lock:
            others = self._progress_of_others()
        found = consistency.find_late_mismatch(self.rank, here, others, self._agreements)
        if found is not None:
            return self._mismatch_failure(found)
        since = consistency.last_change(here.history)
        if len(others) == self.size - 1 and all(p.history and p.history[0] >= since for p in others.values()):
            heartbeat.settled_to = since
        return None

    def _find_stall(self, here: Progress) -> Failure | None:
        tracker, peers = self._tracker, self._heartbeat.peers
        if not tracker.failed and here.idle < min(self.timeout, _MOVING):
            return None
        detector = load("stall_detector")
        with self._heartbeat.lock:
            working: tuple[int, ...] = ()
            mutual: tuple[str, tuple[int, ...]] = ("", ())
            if here.idle >= self.timeout:
                everywhere = {**self._progress_of_others(), self.rank: here}
                working = load("diagnosis").working_ranks(self._plan(), everywhere)
                mutual = self._mutual_waits(everywhere, self.timeout if working else self.timeout / 2)
            where = tracker.where()
            step = here.step if where is None else where.step
            waits_on, between = tracker.waits_on(), here.state == AFTER
            own = detector.OwnState(
                self.rank, self.size, step, here.idle, waits_on, tracker.failed, working, between, mutual
            )
            found = detector.find_stall(peers, own, self.timeout, time.monotonic(), state_of, self.patience)
            if found is not None and found.suspects and not own.failed and not self._confirmed(found.suspects):
                return None
        if found is None and self.rank in working:
            self._warn_that_it_takes_long(here)
        if found is not None and mutual[0] and mutual[0] in found.why:
            # Now, not where it is raised: the host is perhaps in a call that no abort ends.
            logger.error("pipeline rank %d gives up its step: %s", self.rank, found.why)
        return None if found is None else self._stall_failure(here, found.why, found.suspects)

    def _mutual_waits(self, everywhere: Mapping[int, Progress], seconds: float) -> tuple[str, tuple[int, ...]]:
        """Which operations of ranks have waited for each other's messages for ``seconds``, and these ranks."""
        for place in self._tracker.places() if self.completed is not None else ():
            found = load("mutual_waits").find(place.plan, place.step, everywhere, seconds)
            if found[1]:
                return found
        return "", ()

    def _confirmed(self, suspects: tuple[int, ...]) -> bool:
        """Whether peers were read since these were suspected, if they can be: one that ends has published it first."""
        now = time.monotonic()
        since = self._gone_since.setdefault(suspects, now)
        return self._heartbeat.peers.read_at > since or now - since > _ANOTHER_READ

    def _plan(self) -> Any:
        where = self._tracker.where()
        return None if where is None else where.plan

    def _warn_that_it_takes_long(self, here: Progress) -> None:
        """Once per operation, on the rank that is in it, with the place in the user's code."""
        operation = (here.step, here.position, here.text)
        if self._warned_of == operation:
            return
        self._warned_of = operation
        logger.warning(
            "pipeline rank %d has been in %s for %.0f s (config.p2p_timeout); the others wait, "
            "and give up after %.0f s (config.compute_timeout). Its stack:\n%s",
            self.rank, self._tracker.place()[1], here.idle, self.patience,
            load("host_threads").stacks(self._main),
        )  # fmt: skip

    def _conclude(self, failure: Failure, is_news: bool) -> None:
        """Settle on ``failure``, publish it if the others do not know it yet, and make every transfer here fail."""
        seconds = 0.0 if self._heartbeat.has_lost_store(_PUBLISHING) else _PUBLISHING
        unknown = is_news and not self._heartbeat.publish(failure, seconds)
        with self._heartbeat.lock:
            # What this rank has found may follow from what others published since it last read the store: a rank that
            # publishes its error ends, and others find that its process is gone.
            known = self._heartbeat.peers.failure
            self.failure = self.failure or (failure if known is None or failure.kind == EXCEPTION else known)
            self._heartbeat.peers.failure = known or self.failure  # the watch goes on, also where the store is gone
            self._known_since = self._known_since or time.monotonic()
            self._heartbeat.lock.notify_all()
        if unknown and self.completed is not None and self.escalate is not None:
            self.escalate()  # before the pipeline: others, who find no failure, would reduce what that leaves behind
        self._abort()

    def _abort(self) -> None:
        """Where the host runs ahead, streams go on after an abort without what was not delivered, and may reduce with
        others what they make of it. So it waits until no rank relies any more on having found no failure."""
        if self.completed is not None and self._known_since is not None:
            lease = _LEASES * self._heartbeat.pace.lease
            time.sleep(max(0.0, self._known_since + lease - time.monotonic()))
        self.abort()

    def _await_readers(self) -> None:
        """By default this process holds the store, which ends with it: the others read the failure before."""
        pace = self._heartbeat.pace
        elsewhere = (self.world_size or self.size) > self.size
        self._heartbeat.await_readers(2 * pace.poll if elsewhere else 0.0, _LEASES * pace.lease)

    def _show_stack(self) -> None:
        """For the watchdog: this rank hangs in code that cannot be interrupted. Log where."""
        logger.error(
            "pipeline rank %d has to leave its step (%s) but is still in %s:\n%s",
            self.rank, load("diagnosis").first_line(self.failure), self._tracker.place(of_host=True)[1],
            load("host_threads").stacks(self._main),
        )  # fmt: skip

    def _error(self) -> PipelineError:
        """What this rank raises now because of the failure."""
        error = self._new_error()
        self._raised = error if self._tracker.is_within else None
        return error

    def _new_error(self) -> PipelineError:
        error: PipelineError = load("diagnosis").error_of(self.failure, self.pipeline, self.rank, self._tracker.doing())
        return error

    def _new_failure(self, kind: str, message: str, **content: Any) -> Failure:
        place = ("", "") if kind == MISMATCH else self._tracker.place(of_host=kind == EXCEPTION)
        who, process = (self.pipeline, self.rank, self._global_rank), self._tracker.process
        return Failure(kind, *who, *place, message=message, at=time.monotonic(), process=process, **content)

    def _stall_failure(self, here: Progress, why: str, suspects: tuple[int, ...]) -> Failure:
        now = time.monotonic()
        seen = {rank: (peer.progress, now - peer.moved_at) for rank, peer in self._heartbeat.peers.seen.items()}
        plan = self._plan()
        if plan is not None and not suspects:
            in_step = {r: p for r, (p, _) in {**seen, self.rank: (here, 0.0)}.items() if p.state == IN_STEP}
            suspects = load("diagnosis").busy_ranks(plan, in_step)
            if suspects:
                why += f"; held up by rank {', '.join(map(str, suspects))}, which waits for no other rank"
        if suspects and self.members and (self.world_size or self.size) > self.size:
            why += f" (global rank {', '.join(str(self.members[rank]) for rank in suspects)})"
        text = load("diagnosis").stall_text(self.rank, plan, here, seen, self.size, why)
        lines = load("diagnosis").progress_lines(self.rank, plan, here, seen, self.size)
        return self._new_failure(STALL, text, suspects=suspects, values=_by_text(lines))


def _by_text(by_rank: Mapping[int, str]) -> dict[str, str]:
    return {str(rank): value for rank, value in by_rank.items()}

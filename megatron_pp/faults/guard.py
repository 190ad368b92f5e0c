"""The fault guard that a pipeline step runs under: a failure of one rank becomes an error on all, instead of a hang.

``with guard.step(executor): ...`` costs a few assignments. Two threads sleep most of the time: the heartbeat publishes
this rank's position to the store and reads failures of others, the watchdog detects stalls. A rank that raises
publishes a record; the others read it within half a second and abort their communicators, so that their transfers
fail, and the guard replaces that error by one that reports the rank, the place and the cause.

A rank that has finished its step before another one fails is not disturbed until it enters its next step; it has
finished when its device has, where the host runs ahead. A failure that is found between the host's end of a step and
its next step is logged immediately, and the next step raises it. After a failure the guard and its communicator are
closed. A program that continues makes new ones, and new process groups.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from megatron_pp.errors import CommunicatorClosedError
from megatron_pp.faults import consistency
from megatron_pp.faults.heartbeat import Heartbeat, Pace
from megatron_pp.faults.position.places import Source
from megatron_pp.faults.position.tracker import Outside, Tracker
from megatron_pp.faults.store.fault_store import FaultStore
from megatron_pp.faults.store.records import AFTER, Entry, Progress
from megatron_pp.faults.watchdog import Watchdog

if TYPE_CHECKING:
    from megatron_pp.faults.failing import Failing
    from megatron_pp.faults.position.device_events import CompletedWork
    from megatron_pp.faults.position.host_ahead import InstructionMarks
    from megatron_pp.faults.store.failures import Failure

logger = logging.getLogger("megatron_pp")

_MOVING = 1.0  # seconds since a rank's position changed; within this time it neither blocks nor is blocked

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
        self.job_rank = self.rank if self.global_rank is None else self.global_rank
        self.tracker, self.marks = self._made_tracker()
        whose = self.pipeline, self.rank, self.size, self.job_rank, self.members
        connect = partial(FaultStore, self.store, *whose, time.monotonic(), self.tracker.process)
        self.heartbeat = Heartbeat(connect, Pace.of(self.timeout, self.world_size or self.size), self.tracker)
        self._watchdog = Watchdog(
            self.tracker, self.heartbeat, self._act, lambda watchdog: self.failing.await_exit(watchdog)
        )
        # The error that this rank raised and handled. Kept within steps only: its traceback holds a step's tensors.
        self.raised: BaseException | None = None
        self.caller = 0
        self.followed_by = ""  # ``after`` of the last step, also when its watch has ended with the store
        self.failure: Failure | None = None
        self.known_since: float | None = None  # when a failure became known, by the monotonic clock
        self.agreement = 0
        self.over: str | None = None
        self._entered_with: Hashable = None
        self._agreements = consistency.Agreements(self.size)
        self._number = consistency.StepNumber()
        if self.completed is not None:
            from megatron_pp.faults import optimizer_hooks

            optimizer_hooks.ask_before_updates(self)

    def _made_tracker(self) -> tuple[Tracker, InstructionMarks | None]:
        if self.completed is None:
            return Tracker(self.rank, self.size), None
        from megatron_pp.faults.position.host_ahead import InstructionMarks, TrackerOfDevice

        tracker = TrackerOfDevice(self.rank, self.size, self.completed)
        return tracker, InstructionMarks(tracker)

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
        """A context for one step; ``source`` has its position. If ``key`` is new, ``describe()`` (field name -> value)
        is compared among all ranks before the step begins. If ``key`` was agreed on before, but not for the last step,
        the ranks check during the step that all have changed to the same. The difference between the program's
        ``number`` of this step and of the last one is a part of the key. ``after``: what the program does with other
        ranks until the next step, in words. If given, the guard looks for dead peers and failures until then, or until
        it is closed.

        Raises, entering or leaving: PipelinePeerError, PipelineStallError, PipelineMismatchError,
        CommunicatorClosedError after a failure. An error of this rank's own is raised as it is."""
        if self.over is not None:
            raise CommunicatorClosedError(
                f"pipeline rank {self.rank}: this communicator cannot be used any more: {self.over}"
            )
        self.raise_unreported()
        try:
            self._enter(source, key, describe, number, phase)
            yield self
            self.tracker.mark("the end of the step")
        except BaseException as error:
            self._leave(error)
            raise
        else:
            self._leave(None, after)

    def raise_unreported(self) -> None:
        """Raises the failure that was found since the last step, if no step has raised it."""
        if self.failure is not None and self.over is None:
            from megatron_pp.faults.causes import diagnosis

            self.over = diagnosis.first_line(self.failure)
            self.tracker.rest()
            raise self.failing.error()

    def watch(self, what: str) -> AbstractContextManager[FaultGuard]:
        """A context for ``what`` a program does with other ranks between steps, such as an optimizer step. It may also
        contain steps. Failures are handled as in a step."""
        return self.step(Outside(), phase=what)

    def check(self) -> None:
        """Raises the failure that ends this step, if there is one. Called by a rank that waits for something other than
        a transfer."""
        if self.failure is not None:
            raise self.failing.error()

    def before_update(self) -> None:
        """Called before an optimizer of this thread changes parameters, if the host runs ahead. Returns when the device
        has done everything that was issued to the current stream and no rank has published a failure. Received tensors,
        and what was reduced from them, are then those that were sent.

        A rank aborts more than a lease after its failure was published (``failing.py``). This rank's last look at the
        store is not older than a lease, so a rank that received garbage from an aborted transfer has seen the failure.
        Raises what ``step`` raises."""
        if self.completed is None or threading.get_ident() != self.caller or self.is_gone():
            return
        heartbeat = self.heartbeat
        with self.step(Outside(), phase="the wait for transfers, before the optimizer", after=self.tracker.after):
            self.completed.synchronize()
            with heartbeat.lock:
                heartbeat.lock.wait_for(lambda: self.failure is not None or heartbeat.is_fresh())
                known = heartbeat.peers.failure
            if known is not None:
                self.failing.conclude(known, False)

    def phase(self, text: str) -> None:
        """Name what this rank does after the plan, within the step."""
        self.tracker.phase = text

    def close(self, wait: bool = True) -> None:
        """End the guard. ``wait``: also wait for the end of its threads."""
        self.over = self.over or "it was closed"
        if self.completed is not None:
            from megatron_pp.faults import optimizer_hooks

            optimizer_hooks.ask_no_more(self)
        self.tracker.end()
        self.tracker.rest()
        self._watchdog.close(wait)
        self.heartbeat.close(wait)

    def _enter(self, source: Source, key: Hashable, describe: Describe | None, number: int | None, phase: str) -> None:
        self.caller = threading.get_ident()
        move = "" if number is None else self._number.move(number)
        key = (key, move)
        changed = describe is not None and key != self._entered_with
        known = self._agreements.use(key) if changed else 0
        shown = "" if number is None else str(number)
        self.tracker.begin(source, changed and not known, phase, known, shown)
        if self.heartbeat.parked:
            self.heartbeat.wake()
        if not self._watchdog.awake.is_set():
            self._watchdog.wake()
        if describe is None or not changed:
            return
        if known:
            self.heartbeat.asked_from = self.tracker.step
        else:
            # The number comes first, because ranks in different steps differ in other fields too.
            description = {consistency.MOVE: move, consistency.NUMBER: shown, **describe()}
            known = self._agreements.add(key, self._check_entry(description))
            self.tracker.agreed(known)
        self.agreement = known
        self._entered_with = key

    def _check_entry(self, description: dict[str, str]) -> dict[int, Mapping[str, str]]:
        """Compare plans with all ranks. Returns what each rank entered with."""
        heartbeat, step = self.heartbeat, self.tracker.step
        entry = Entry(step, description, self.tracker.process)
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
                from megatron_pp.faults import layer_order

                mismatch = mismatch or layer_order.find_mismatch(entries, step)
            if mismatch is not None:
                self.failing.conclude(self.failing.mismatch(mismatch), True)
            if self.failure is not None:
                raise self.failing.error()
        finally:
            heartbeat.poll_fast(False)
        return {rank: known.description for rank, known in entries.items() if known.step == step}

    def _mismatch(self, step: int) -> consistency.Mismatch | None:
        entries, progress = self.heartbeat.peers.entries, self.progress_of_others()
        if consistency.have_gone_on(entries, progress, step):
            from megatron_pp.faults import histories

            return histories.mismatch_on_entry(self.rank, step, entries, progress, self._agreements)
        return consistency.find_mismatch(self.rank, entries, step)

    def progress_of_others(self) -> dict[int, Progress]:
        return {rank: seen.progress for rank, seen in self.heartbeat.peers.seen.items()}

    @cached_property
    def failing(self) -> Failing:
        """The part of the guard that handles a step that stalls or fails."""
        from megatron_pp.faults.failing import Failing

        found: Failing = Failing(self)
        return found

    def _leave(self, error: BaseException | None, after: str = "") -> None:
        """Called when the step has ended, with ``error`` or without. Raises what the caller should see in its place."""
        try:
            if error is not None:
                self.failing.leave_with(error)
            elif self.failure is not None:
                raise self.failing.error()
        finally:
            if error is not None or self.failure is not None:
                self.failing.end()
                after = ""
            self.tracker.end(after)
            self.followed_by = after
            if not self.tracker.is_within:
                self.raised = None

    def _act(self) -> bool:
        """Called by the watchdog: if there is a failure, make every transfer fail. Returns whether there is one."""
        in_step = self.tracker.source is not None  # read first: after a failure the step may end at any time
        known = self.failure or self.heartbeat.peers.failure
        here = self.tracker.observe()
        if here is None:
            return False
        if here.state == AFTER and self.is_gone():
            self.tracker.rest()
            return False
        failure = known or self._find_late_mismatch(here)
        if failure is None and (self.tracker.failed or here.idle >= min(self.timeout, _MOVING)):
            failure = self.failing.find_stall(here)
        if failure is not None:
            self.failing.conclude(failure, known is None)
            if not in_step:
                self.failing.log(here)
        return failure is not None

    def _find_late_mismatch(self, here: Progress) -> Failure | None:
        """The failure if ranks returned to different plans. Polling ends once all were seen to use the same plan."""
        heartbeat = self.heartbeat
        if not heartbeat.peers.seen:
            return None
        with heartbeat.lock:
            others = self.progress_of_others()
        if any(consistency.may_differ(here.history, other.history) for other in others.values()):
            from megatron_pp.faults import histories

            found = histories.find_late_mismatch(self.rank, here, others, self._agreements)
            if found is not None:
                return self.failing.mismatch(found)
        since = consistency.last_change(here.history)
        if len(others) == self.size - 1 and all(p.history and p.history[0] >= since for p in others.values()):
            heartbeat.settled_to = since
        return None

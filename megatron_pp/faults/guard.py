"""Errors instead of hangs: what a pipeline step runs under.

``with guard.step(executor): ...`` costs a few assignments. While the step runs, two threads sleep most of the time:
the link tells the store once a second where this rank is and looks for failures of others, the watch judges whether
the pipeline has stalled. Where a rank raises, it leaves a record; the others find it within half a second, abort their
communicators, so that whatever they wait for fails, and the guard turns that failure into an error that says who,
where and why.

A rank that has finished its step before another one fails is not disturbed in what it does then: it learns of the
failure when it enters its next step. After a failure the guard and its communicator are closed; a program that goes on
makes new ones (the process groups of an aborted communicator have to be made anew as well, ``destroy_process_group``
and ``init_process_group`` work).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import TracebackType
from typing import Any

from megatron_pp.errors import CommunicatorClosedError, PipelineError
from megatron_pp.faults.agreement import Agreements, last_change
from megatron_pp.faults.consistency import Mismatch, arrived, find_mismatch, find_parting
from megatron_pp.faults.diagnosis import Source, busy_ranks, stall_text, working_ranks
from megatron_pp.faults.heartbeat import Link, Pace
from megatron_pp.faults.liveness import state_of
from megatron_pp.faults.origin import is_consequence, is_raised_by_python, tail_of, text_of, type_name
from megatron_pp.faults.records import EXCEPTION, IN_STEP, MISMATCH, STALL, Entry, Failure, Progress
from megatron_pp.faults.report import error_of, first_line
from megatron_pp.faults.stall_detector import Own, judge
from megatron_pp.faults.step_number import MOVE, NUMBER, StepNumber
from megatron_pp.faults.store import Board
from megatron_pp.faults.tracker import Outside, Tracker
from megatron_pp.faults.watch import Watch

logger = logging.getLogger("megatron_pp")

# Seconds.
_TELLING = 3.0  # that a rank which failed gives the store to take its record
_GRACE = 6.0  # that a rank whose transfer failed looks for the reason

Describe = Callable[[], Mapping[str, str]]


class FaultGuard:
    """One per communicator, long-lived.

    store        any torch Store that all ranks of the pipeline share; see ``Board``
    pipeline     name of the pipeline group; rank, size: within it
    timeout      seconds (``config.p2p_timeout``) without a sign of life, or without anybody moving, after which the
                 step is given up; where what does not move is a rank's own work, and its process lives, that rank says
                 after this time what it is in, and the step is given up after ``patience`` (``config.compute_timeout``)
    abort        makes blocked and later transfers of this rank's communicator fail; called from another thread
    escalate     called where that did not bring this rank out of its step: aborts all else it may be blocked in
                 (tensor- or data-parallel groups)
    global_rank, world_size, members   in the whole job, ``members`` being the numbers of the pipeline's ranks; by
                 default the pipeline is the job

    ``agreement`` is the number of what the ranks have agreed on for the step under way: whatever needs to tell one
    plan's messages from another's can go by it.
    """

    def __init__(
        self,
        store: Any,
        pipeline: str,
        rank: int,
        size: int,
        timeout: float,
        abort: Callable[[], None],
        *,
        escalate: Callable[[], None] | None = None,
        global_rank: int | None = None,
        world_size: int | None = None,
        members: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = pipeline
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.patience = timeout
        self.verdict: Failure | None = None
        self._abort = abort
        self._escalate = escalate
        self._clock = clock
        self._global_rank = rank if global_rank is None else global_rank
        self._tracker = Tracker(rank, size, clock)
        board = Board(store, pipeline, rank, size, self._global_rank, members)
        pace = Pace.of(timeout, world_size or size)
        self._link = Link(board, pace, self._tracker.observe, self._tracker.at_rest, clock)
        self._watch = Watch(self, self._link)
        self._entered_with: Hashable = None
        self._agreements = Agreements(size)
        self._number = StepNumber()
        self.agreement = 0
        self._over: str | None = None
        self._raised: BaseException | None = None  # by this rank, and dealt with
        self._main = 0
        self._told_of: tuple[int, int, str] | None = None

    # -- what the engine calls -----------------------------------------------------------------------------------------

    def step(
        self, source: Source, key: Hashable = None, describe: Describe | None = None, number: int | None = None
    ) -> Step:
        """A context manager around one step. ``source`` tells the position. Where ``key`` is new, ``describe()``
        (field name -> value) is compared among all ranks before the step begins; where it changed to one that was
        agreed on before, the ranks find out during the step whether all have changed to the same. How the program's
        ``number`` of the step follows on the last one's is part of the key.

        Raises, entering or leaving: PipelinePeerError, PipelineStallError, PipelineMismatchError,
        CommunicatorClosedError after a failure. An error of this rank's own is raised as it is.
        """
        return Step(self, source, key, describe, number=number)

    def watch(self, what: str) -> Step:
        """A context manager around ``what`` a program does between steps together with other ranks, such as an
        optimizer step with its collectives, or around that and steps: failures reach it, and leave it, as they do a
        step.
        """
        return Step(self, Outside(), None, None, what)

    def phase(self, text: str) -> None:
        """What this rank does when it is through with the plan, within the step; "" inside the plan."""
        self._tracker.phase = text

    def close(self) -> None:
        """End the threads."""
        self._over = self._over or "it was closed"
        self._tracker.end()
        self._watch.close()
        self._link.close()

    def reset(self) -> None:
        """After a failure, with a communicator that works again: begin anew. Every rank of the job has to."""
        self.verdict = None
        self._over = None
        self._entered_with = None
        self._agreements = Agreements(self.size)
        self._number = StepNumber()
        self.agreement = 0
        self._tracker.forget()
        self._link.forget()

    # -- entering ------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises CommunicatorClosedError after a failure."""
        if self._over is not None:
            raise CommunicatorClosedError(
                f"pipeline rank {self.rank}: this communicator can not be used any more: {self._over}"
            )

    def enter(
        self, source: Source, key: Hashable, describe: Describe | None, phase: str = "", number: int | None = None
    ) -> None:
        """See ``step``."""
        self._main = threading.get_ident()
        move = self._number.move(number)
        key = (key, move)
        changed = describe is not None and key != self._entered_with
        known = self._agreements.use(key) if changed else 0
        told = "" if number is None else str(number)
        self._tracker.begin(source, changed and not known, phase, known, told)
        self._link.wake()
        self._watch.wake()
        if describe is None or not changed:
            return
        if known:
            self._link.asked_from = self._tracker.step
        else:
            description = {MOVE: move, NUMBER: told, **describe()}  # first: ranks in different steps differ in more
            known = self._agreements.add(key, self._check_entry(description))
            self._tracker.agreed(known)
        self.agreement = known
        self._entered_with = key

    def _check_entry(self, description: dict[str, str]) -> dict[int, Mapping[str, str]]:
        """Compare plans with all ranks; what each entered with."""
        link, step = self._link, self._tracker.step
        entry = Entry(step, description, self._tracker.process)
        self._tracker.entering(True)
        try:
            link.tell(entry, 0.0)
            with link.lock:
                link.lock.wait_for(lambda: self.verdict is not None or self._entry_is_settled(step))
                mismatch = self._mismatch(step)
                entries = {**link.view.entries, self.rank: entry}
            if mismatch is not None:
                self._conclude(self._disagreement(mismatch), True)
            if self.verdict is not None:
                raise self._error()
        finally:
            link.hurry(False)
        return {rank: known.description for rank, known in entries.items() if known.step == step}

    def _entry_is_settled(self, step: int) -> bool:
        return self._mismatch(step) is not None or len(arrived(self._link.view.entries, step)) == self.size

    def _mismatch(self, step: int) -> Mismatch | None:
        return find_mismatch(self.rank, self._link.view.entries, self._steps_of_others(), step, self._agreements)

    def _disagreement(self, found: Mismatch) -> Failure:
        values = {str(rank): value for rank, value in found.values.items()}
        return self._failure(MISMATCH, message=str(found), field=found.field, values=values)

    def _steps_of_others(self) -> dict[int, Progress]:
        return {rank: seen.progress for rank, seen in self._link.view.seen.items()}

    # -- leaving -------------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """The step ended, with ``error`` or without; raises what the caller should see instead of it."""
        try:
            if error is None:
                if self.verdict is not None:
                    raise self._error()
            elif error is self._raised:
                pass  # dealt with where it was raised, inside
            elif is_consequence(error) or (self.verdict is not None and _may_be_of_an_aborted_group(error)):
                raise self._reason_for(error) from error
            else:
                self._raised = error
                self._conclude(self._own_failure(error), True)
        finally:
            if error is not None or self.verdict is not None:
                self._over = self._over or first_line(self.verdict)
            self._tracker.end()

    def _own_failure(self, error: BaseException) -> Failure:
        """This rank is the cause."""
        instruction, where = self._tracker.place()
        return self._failure(
            EXCEPTION,
            instruction=instruction,
            where=where,
            exception_type=type_name(error),
            message=text_of(error),
            traceback_tail=tail_of(error),
        )

    def _reason_for(self, error: BaseException) -> PipelineError:
        """A transfer failed: why? Somebody's record, a process that is gone, a rank that is silent; or the connection
        alone."""
        reason = text_of(error).partition("\n")[0]
        failed = f"a transfer of rank {self.rank} failed ({type_name(error)}: {reason})"
        self._tracker.failed = failed
        self._link.hurry(True)
        with self._link.lock:
            self._link.lock.wait_for(lambda: self.verdict is not None, min(_GRACE, max(self.timeout, 1.0)))
        self._link.hurry(False)
        if self.verdict is None:
            here = self._tracker.observe()
            assert here is not None
            self._conclude(self._stall(here, failed, ()), True)
        assert self.verdict is not None
        return self._error()

    # -- failures ------------------------------------------------------------------------------------------------------

    def act(self) -> bool:
        """Called by the watch, often: if there is a failure to act on, make every transfer here fail; whether it
        did."""
        failure, is_news = self.verdict or self._link.view.failure, False
        here = self._tracker.observe()
        if here is None:
            return False
        if failure is None:
            failure, is_news = self._parting(here) or self._judge(here), True
        if failure is None:
            return False
        self._conclude(failure, is_news)
        return True

    def _parting(self, here: Progress) -> Failure | None:
        """The ranks came back to different plans. Once all are seen to have changed alike, nobody asks any more."""
        if not self._link.view.seen:
            return None
        with self._link.lock:
            others = self._steps_of_others()
        found = find_parting(self.rank, here, others, self._agreements)
        if found is not None:
            return self._disagreement(found)
        since = last_change(here.history)
        if len(others) == self.size - 1 and all(p.history and p.history[0] >= since for p in others.values()):
            self._link.settled_to = since
        return None

    def _judge(self, here: Progress) -> Failure | None:
        view = self._link.view
        with self._link.lock:
            waits_on, failed = self._tracker.waits_on(), self._tracker.failed
            working = self._working(here) if here.idle >= self.timeout else ()
            own = Own(self.rank, self.size, here.step, here.idle, waits_on, failed, working)
            found = judge(view, own, self.timeout, self._clock(), state_of, self.patience)
        if found is None and self.rank in working:
            self._say_that_it_takes_long(here)
        return None if found is None else self._stall(here, found.why, found.suspects)

    def _working(self, here: Progress) -> tuple[int, ...]:
        source = self._tracker.source
        plan = None if source is None else source.plan
        return working_ranks(plan, {**self._steps_of_others(), self.rank: here})

    def _say_that_it_takes_long(self, here: Progress) -> None:
        """Once for each operation, and by the rank that is in it, which knows where in the user's code that is."""
        if self._told_of == (here.step, here.position, here.text):
            return
        self._told_of = (here.step, here.position, here.text)
        logger.warning(
            "pipeline rank %d has been in %s for %.0f s (config.p2p_timeout); the others wait, "
            "and give up after %.0f s (config.compute_timeout). It is in:\n%s",
            self.rank, self._tracker.place()[1], here.idle, self.patience, self._stack(),
        )  # fmt: skip

    def _conclude(self, failure: Failure, is_news: bool) -> None:
        """Settle on ``failure``, tell the others if they do not know it yet, and make every transfer here fail."""
        if is_news:
            self._link.tell(failure, _TELLING)
        with self._link.lock:
            self.verdict = self.verdict or self._cause_of(failure)
            self._link.lock.notify_all()
        self._abort()

    def _cause_of(self, failure: Failure) -> Failure:
        """What this rank has found may follow from what others told since it last looked at the store: a rank that
        tells of an error ends, and others find that its process is gone."""
        known = self._link.view.failure
        return failure if known is None or failure.kind == EXCEPTION else known

    def escalate(self) -> None:
        """This rank did not come out of its step."""
        if self._escalate is not None:
            self._escalate()

    def in_step(self) -> bool:
        """Whether this rank is inside a step."""
        return self._tracker.source is not None

    def show_stack(self) -> None:
        """This rank does not leave its step at all: it hangs in code that nobody can interrupt. Say where."""
        logger.error(
            "pipeline rank %d was to leave its step (%s) but is still in %s:\n%s",
            self.rank, first_line(self.verdict), self._tracker.place()[1], self._stack(),
        )  # fmt: skip

    def _stack(self) -> str:
        """Where the thread that runs the step is."""
        frame = sys._current_frames().get(self._main)
        return "".join(traceback.format_stack(frame)[-8:]) if frame is not None else ""

    def _error(self) -> PipelineError:
        """What this rank raises because of the verdict."""
        assert self.verdict is not None
        error = error_of(self.verdict, self.pipeline, self.rank, self._tracker.doing())
        self._raised = error
        return error

    def _failure(self, kind: str, **content: Any) -> Failure:
        return Failure(kind, self.pipeline, self.rank, self._global_rank, **content)

    def _stall(self, here: Progress, why: str, suspects: tuple[int, ...]) -> Failure:
        now = self._clock()
        view = self._link.view
        seen = {rank: (s.progress, now - s.moved_at) for rank, s in view.seen.items()}
        source = self._tracker.source
        plan = None if source is None else source.plan
        if plan is not None and not suspects:
            in_step = {r: p.position for r, (p, _) in {**seen, self.rank: (here, 0.0)}.items() if p.state == IN_STEP}
            suspects = busy_ranks(plan, in_step)
            if suspects:
                why += f"; held up by rank {', '.join(map(str, suspects))}, which waits for nobody"
        text = stall_text(self.rank, plan, here, seen, self.size, why)
        instruction, where = self._tracker.place()
        return self._failure(STALL, message=text, instruction=instruction, where=where, suspects=suspects)


def _may_be_of_an_aborted_group(error: BaseException) -> bool:
    return type(error) is RuntimeError and not is_raised_by_python(error)


class Step:
    """One step under a guard, or something else that is watched; a context manager."""

    __slots__ = ("_describe", "_guard", "_key", "_number", "_phase", "_source")

    def __init__(
        self,
        guard: FaultGuard,
        source: Source,
        key: Hashable,
        describe: Describe | None,
        phase: str = "",
        number: int | None = None,
    ) -> None:
        self._guard = guard
        self._source = source
        self._key = key
        self._describe = describe
        self._phase = phase
        self._number = number

    def __enter__(self) -> FaultGuard:
        guard = self._guard
        guard.check_open()
        try:
            guard.enter(self._source, self._key, self._describe, self._phase, self._number)
        except BaseException as error:
            guard.leave(error)
            raise
        return guard

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.leave(error)

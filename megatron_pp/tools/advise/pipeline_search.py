"""The search for the best pipeline. All candidates are estimated. Then plans are built, verified and simulated, the
fastest estimates first. Work is counted in operations, so that the answer does not depend on the machine's load. A
budget in seconds, if it is given, replaces these counts.
"""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.tools.advise.candidates import Candidate, Estimate, candidates, estimate, why_none
from megatron_pp.tools.advise.evaluate import Outcome, evaluate
from megatron_pp.tools.advise.fit import Fitted
from megatron_pp.tools.advise.less_memory import Smaller, smaller_searches
from megatron_pp.tools.advise.question import Question
from megatron_pp.tools.advise.rounding import rounded

Report = Callable[[int, int, str], None]
"""A function that gets the finished work, the whole work, and the current candidate in words."""

_GAIN = 0.002  # a search is run only if its bound is below the best step by this share
_AS_FAST = 1e-3  # steps whose times differ by less count as equally fast
# Overtime until a first plan fits: this many budgets, or seconds, whichever is longer.
_EXTRA = 1.0
_FIRST = 5.0
_FIRST_LOOK = 2.0  # seconds for estimates, or half of the budget
_CLOSER = 0.5  # expected distance of a search for less memory from its bound, as a share of this search's distance
_CHUNK = 0.003  # a search with one chunk more takes longer, so its bound must be lower by this share
_POLL = 0.02  # seconds between two checks of other processes
_LOOK = 0.1  # seconds between two checks of the budget
_AGAIN = 1.0  # seconds to the next KeyboardInterrupt; one in a callback of the garbage collector is lost
# Work, in forwards of a step on all stages. About 10,000 of them are built, verified and simulated in a second.
_PLANS = 400_000  # work of all plans, without a budget
_VARIANTS = 100_000  # work of all variants of the best plan
_SEARCHES = 200_000  # work of all searches
_LESS_MEMORY = 100_000  # work of all searches with smaller memory limits
_ESTIMATES = 1_500_000  # work of all estimates; they take a fifth of the time of plans
_ESTIMATES_S = 30.0  # seconds for these estimates; a longer budget allows more of them


@dataclass(frozen=True)
class Findings:
    """The results of a search.

    not_looked_at  candidates for which there was no time
    needless       searches that were not run, because they cannot find a shorter step
    interrupted    a KeyboardInterrupt ended the search before the budget was spent
    """

    question: Question
    outcomes: tuple[Outcome, ...]
    estimates: tuple[Estimate, ...]
    not_looked_at: tuple[Candidate, ...]
    needless: tuple[Candidate, ...]
    seconds: float
    interrupted: bool = False

    @property
    def cut_short(self) -> bool:
        """Whether candidates were not evaluated that may be better than the answer."""
        return bool(self.not_looked_at)

    @property
    def fitting(self) -> list[Outcome]:
        """The possible outcomes, the fastest first. Equally fast ones are sorted by memory, then by chunks. The order
        does not depend on which process ended first.
        """
        return sorted((one for one in self.outcomes if not one.refused), key=_preference)

    @property
    def best(self) -> Outcome | None:
        """The fastest outcome with Megatron's flags. Of equally fast outcomes, it is the one with the least memory,
        then the fewest chunks.
        """
        fitting = self.fitting
        least = min((one.flagged for one in fitting), default=0.0)
        as_fast = [one for one in fitting if one.flagged <= least * (1 + _AS_FAST)]
        return min(as_fast, key=_frugality, default=None)

    @property
    def least_memory(self) -> Outcome | None:
        """The plan with the least memory among the built plans that may be recommended. It may not fit."""
        built = [one for one in self.outcomes if one.fit is not None and self.question.takes(one.candidate.schedule)]
        return min(built, key=lambda one: one.peak, default=None)

    @property
    def front(self) -> list[Outcome]:
        """The Pareto front: the fastest first; each outcome has less memory than all before it."""
        front: list[Outcome] = []
        for one in self.fitting:
            if not front or one.peak < front[-1].peak * (1 - 1e-9):
                front.append(one)
        return front


def _preference(one: Outcome) -> tuple[float, float, int, str, str]:
    return rounded(one.step), rounded(one.peak), one.candidate.num_chunks, *_names(one.candidate)


def _frugality(one: Outcome) -> tuple[float, float, int, str, str]:
    return round(one.peak, 6), rounded(one.flagged), one.candidate.num_chunks, *_names(one.candidate)


def _names(candidate: Candidate) -> tuple[str, str]:
    """The names by which equal candidates are sorted."""
    return str(candidate), candidate.policy


def search(question: Question, budget: float | None = None, jobs: int = 1, report: Report | None = None) -> Findings:
    """The best pipelines for ``question`` that ``jobs`` processes find in ``budget`` seconds, or until a
    KeyboardInterrupt. Without a budget the search ends after a fixed number of operations, so the answer is the same on
    every machine.

    Raises PlanError if no candidate is possible with any memory, or if a process of ``jobs`` ends.
    """
    began = time.monotonic()
    queue = _Queue(question, budget)
    say = report or (lambda done, of, what: None)
    interrupted = False
    try:
        with _Evaluator(question, queue, jobs) as evaluator, _ended_in_time(queue):
            _estimate(question, queue, evaluator, say)
            for outcome in evaluator.outcomes():
                queue.outcomes.append(outcome)
                say(*queue.progress, str(outcome.candidate))
    except KeyboardInterrupt:  # from Ctrl-C, or from _ended_in_time
        interrupted = not queue.is_over()
    except BrokenProcessPool as error:
        raise PlanError(
            f"a process of the search ended ({error}). With jobs={jobs} the search starts processes that import the "
            'program\'s main module: call it under `if __name__ == "__main__":` in a file, or with jobs=1'
        ) from error
    seconds = time.monotonic() - began
    left = queue.left()
    looked_at = tuple(queue.outcomes), tuple(queue.estimates)
    return Findings(question, *looked_at, left, tuple(queue.needless), seconds, interrupted)


def _estimate(question: Question, queue: "_Queue", evaluator: "_Evaluator", say: Report) -> None:
    """Estimates the candidates for which there is time, those with few operations first. Plans that are too large to
    build are left out. Searches take long, so the first promising search begins immediately.
    """
    bounds: dict[Any, float] = {}
    found = queue.found
    found += candidates(question)
    if not found:
        raise PlanError(f"nothing is left to try: {why_none(question)}")
    work = 0
    size = question.pipeline_size
    most = max(1.0, (queue.budget or 0.0) / _ESTIMATES_S) * _ESTIMATES
    for candidate in sorted(filter(queue.may_build, found), key=lambda one: one.work_of_estimate(size)):
        work += candidate.work_of_estimate(size)
        if work > most or (queue.estimates and queue.must_build()):
            break
        say(0, 1, f"estimating {candidate}")
        known = len(bounds)
        queue.estimates.append(estimate(question, candidate, bounds))
        work -= candidate.forwards(size) if len(bounds) == known else 0  # the bound was known
    queue.sort()
    if evaluator.jobs > 1 and (first := queue.first_search()):
        evaluator.start(first)


@contextmanager
def _ended_in_time(queue: "_Queue") -> Iterator[None]:
    """A context that, with a budget, raises KeyboardInterrupt in the main thread when the budget is spent."""
    if queue.budget is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def look(*_: object) -> None:
        over = queue.is_over()
        signal.setitimer(signal.ITIMER_REAL, _AGAIN if over else _LOOK)
        if over:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, look)
    began = time.monotonic()
    left, every = signal.setitimer(signal.ITIMER_REAL, _LOOK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left:  # a timer of the caller
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), _LOOK), every)


class _Queue:
    """Chooses the next candidate: first named plans in the order of their estimates, then searches one after another,
    then variants of the best plan. Without a budget the choice depends only on the estimates and earlier results.
    """

    def __init__(self, question: Question, budget: float | None) -> None:
        self.question = question
        self.budget = budget
        self.until = time.monotonic() + (budget or 0.0)
        self.extra = max(_FIRST, _EXTRA * (budget or 0.0))
        self.found: list[Candidate] = []
        self.estimates: list[Estimate] = []
        self.outcomes: list[Outcome] = []
        self.named: list[Estimate] = []
        self.searches: list[Estimate] = []
        self.variants: list[Candidate] = []
        self.work_left = [_PLANS, _SEARCHES, _VARIANTS, _LESS_MEMORY]
        self.less: dict[Candidate, list[Smaller]] = {}
        self.cuts: dict[Candidate, Fitted] = {}  # search for less memory -> the model on its stages
        self.begun: list[Candidate] = []
        self.needless: list[Candidate] = []

    def sort(self) -> None:
        """Sorts the candidates: those that fit first, the fastest before slower ones; last those that may not be
        recommended."""
        self.outcomes += [Outcome(one.candidate, one.refused) for one in self.estimates if one.refused]
        possible = [one for one in self.estimates if not one.refused]
        memory = self.question.memory
        some_fit = any(one.peak <= memory for one in possible)

        def promise(one: Estimate) -> tuple[bool, bool, float, str, str]:
            refused = not self.question.takes(one.candidate.schedule)
            value = rounded(one.step if some_fit else one.peak)
            return refused, one.peak > memory, value, *_names(one.candidate)

        def promise_of_search(one: Estimate) -> tuple[float, float, str, str]:
            bound = rounded(one.bound * (1 + _CHUNK * one.candidate.num_chunks))
            return bound, rounded(one.peak), *_names(one.candidate)

        named = sorted((one for one in possible if not one.candidate.searches), key=promise)
        self.searches = sorted((one for one in possible if one.candidate.searches), key=promise_of_search)
        self.named = [one for one in named if self._affords(one.candidate)]

    def may_build(self, candidate: Candidate) -> bool:
        """Whether the candidate's plan is small enough to build."""
        return self.budget is not None or candidate.work(self.question.pipeline_size) <= _PLANS

    def _affords(self, candidate: Candidate, kind: int | None = None) -> bool:
        """Whether enough work of this kind is left for the candidate. If so, it is spent. With a budget, only time
        counts."""
        work = _work(candidate, self.question.pipeline_size)
        left = self.work_left
        kind = int(candidate.searches) if kind is None else kind
        if self.budget is None and work > left[kind]:
            return False
        left[kind] -= work
        return True

    def first_search(self) -> Candidate | None:
        """The search that begins before any plan is built, if the estimates promise a gain."""
        least = min((one.step for one in self.named if one.peak <= self.question.memory), default=float("inf"))
        for one in self.searches:
            if one.bound < least * (1 - _GAIN) and self._affords(one.candidate):
                self.searches.remove(one)
                return self._begin(one.candidate)
        return None

    def _begin(self, candidate: Candidate) -> Candidate:
        self.begun.append(candidate)
        return candidate

    @property
    def progress(self) -> tuple[int, int]:
        """The finished work, and the whole work that is planned so far."""
        size = self.question.pipeline_size
        done = sum(_work(one.candidate, size) for one in self.outcomes if one.fit is not None)
        left = sum(_work(one.candidate, size) for one in (*self.named, *self.searches))
        built = {one.candidate for one in self.outcomes}
        return done, done + left + sum(_work(one, size) for one in self.begun if one not in built)

    @property
    def best(self) -> float:
        return min((one.step for one in self.outcomes if not one.refused), default=float("inf"))

    def next(self, running: Collection[Candidate]) -> Candidate | None:
        """The next candidate to run while others are ``running``. None if the choice depends on them, or if none is
        left."""
        if self.named:
            return self._begin(self.named.pop(0).candidate)
        if not running:
            while self.searches:
                one = self.searches.pop(0)
                if one.bound >= self.best * (1 - _GAIN):
                    self.needless.append(one.candidate)
                elif self._affords(one.candidate):
                    return self._begin(one.candidate)
            if (smaller := self._with_less_memory()) is not None:
                return self._begin(smaller)
            self.variants = self.variants or self._variants_of_best()
        return self._begin(self.variants.pop(0)) if self.variants else None

    def _with_less_memory(self) -> Candidate | None:
        """A search for less memory that is expected to be better than the best so far. Its expected step follows from
        its bound and from the distance of the search for all memory from its own bound. None with a budget, because
        there may be many such searches."""
        if self.budget is not None or self.best == float("inf"):
            return None
        found = []
        for one in self.outcomes:
            candidate = one.candidate
            if not candidate.searches or candidate in self.cuts or one.fit is None:
                continue
            if candidate not in self.less:
                affordable = self._affords(candidate, 3)  # the bounds of such searches take as long as a search
                self.less[candidate] = [*smaller_searches(self.question, candidate)] if affordable else []
            for smaller in self.less[candidate]:
                likely = smaller.bound * (1 + one.excess * _CLOSER)
                if smaller.candidate not in self.cuts and likely < self.best * (1 - _GAIN):
                    found.append((rounded(likely), *_names(smaller.candidate), smaller))
        for *_, smaller in sorted(found, key=lambda one: one[:3]):
            if self._affords(smaller.candidate, 3):
                self.cuts[smaller.candidate] = smaller.cut
                return smaller.candidate
        return None

    def _variants_of_best(self) -> list[Candidate]:
        """Variants of the best plan so far: other groups and policies; for a search, with a budget, other memory."""
        fitting = [one for one in self.outcomes if not one.refused]
        if not fitting:
            return []
        best = min(fitting, key=_preference).candidate
        size = self.question.pipeline_size
        groups = [2 * size, best.num_microbatches] if best.family.grouped and best.num_chunks > 1 else []
        found = [replace(best, group_size=group) for group in groups if size < group <= best.num_microbatches]
        found += [replace(best, policy=policy) for policy in self.question.policies[1:]]
        if best.searches:
            shares = (best.memory_share / 2, 1.0) if self.budget is not None else ()
            found = [replace(best, memory_share=share) for share in shares]
        return [one for one in found if one not in self.begun and self._affords(one, 2)]

    def cut_of(self, candidate: Candidate) -> Fitted | None:
        """The candidate's model on its stages, from its estimate."""
        if candidate in self.cuts:
            return self.cuts[candidate]
        sizes = _sizes(candidate)
        return next((one.cut for one in self.estimates if _sizes(one.candidate) == sizes), None)

    def must_build(self) -> bool:
        """Whether the budget's part for estimates is spent."""
        if self.budget is None:
            return False
        return time.monotonic() >= self.until - self.budget + max(_FIRST_LOOK, self.budget / 2)

    def is_over(self) -> bool:
        """Whether the budget is spent. If nothing fits so far, there is some overtime."""
        allowed = 0.0 if self.best < float("inf") else self.extra
        return self.budget is not None and time.monotonic() >= self.until + allowed

    def left(self) -> tuple[Candidate, ...]:
        """The candidates and begun variants that have no outcome and may be better."""
        known = {*(one.candidate for one in self.outcomes), *self.needless}
        searches = (one for one in self.estimates if one.candidate.searches and one.candidate not in known)
        self.needless += (one.candidate for one in searches if one.bound >= self.best * (1 - _GAIN))
        known |= {*self.needless}
        return tuple(one for one in dict.fromkeys([*self.found, *self.begun]) if one not in known)


def _sizes(candidate: Candidate) -> tuple[Any, ...]:
    """A key that is equal for candidates whose model is divided in the same way."""
    one = candidate
    return one.schedule, one.num_chunks, one.micro_batch, one.slices, one.offload_chunks


def _work(candidate: Candidate, size: int) -> int:
    """The work for a candidate, in forwards that are built, verified and simulated. A search tries about 5 P plans."""
    return candidate.forwards(size) * 5 * size if candidate.searches else candidate.work(size)


class _Evaluator:
    """Evaluates ``jobs`` candidates at a time, each in a process of its own. The processes end with the budget. A
    single job runs in this process.
    """

    def __init__(self, question: Question, queue: _Queue, jobs: int) -> None:
        self.question = question
        self.queue = queue
        self.jobs = jobs
        self.running: dict[Candidate, Future[Outcome]] = {}
        self.processes: set[BaseProcess] = set()

    def __enter__(self) -> "_Evaluator":
        if self.jobs > 1:  # Ctrl-C reaches all processes; only this one handles it and gives the answer
            spawn = multiprocessing.get_context("spawn")
            ignore = (signal.SIGINT, signal.SIG_IGN)
            self.pool = ProcessPoolExecutor(self.jobs, spawn, signal.signal, ignore)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.terminate()
        if self.jobs > 1:
            self.pool.shutdown(cancel_futures=True)

    def start(self, candidate: Candidate) -> None:
        work = self.question, candidate, self.queue.cut_of(candidate)
        before = multiprocessing.active_children()
        try:
            self.running[candidate] = self.pool.submit(evaluate, *work)
        finally:
            self.processes.update({*multiprocessing.active_children()} - {*before})

    def outcomes(self) -> Iterator[Outcome]:
        queue = self.queue
        running = self.running
        while not queue.is_over():
            while len(running) < self.jobs and (candidate := queue.next(running)):
                if self.jobs > 1:
                    self.start(candidate)
                else:
                    yield evaluate(self.question, candidate, queue.cut_of(candidate))
                    if queue.is_over():
                        return
            if not running:
                return
            done = [candidate for candidate, result in running.items() if result.done()]
            for candidate in done:
                yield running.pop(candidate).result()
            if not done:
                time.sleep(_POLL)

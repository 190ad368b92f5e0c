"""The search for the best pipeline: all candidates are estimated, then built, verified and simulated, the most
promising first, for as long as the budget lasts.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult
from typing import Any

from megatron_pp.errors import PlanError
from megatron_pp.plan.advise.candidates import Candidate, Estimate, candidates, estimate, why_none
from megatron_pp.plan.advise.evaluate import Outcome, evaluate
from megatron_pp.plan.advise.fit import Fitted
from megatron_pp.plan.advise.question import Question

Report = Callable[[int, int, str], None]
"""Takes how many candidates are done, of how many, and what is looked at."""

_GAIN = 0.002  # a search whose bound is not this much below the best step is not worth its time
_AS_FAST = 1e-3  # of steps that differ by less, the one with less memory is better
_EXTRA = 1.0  # of the budget, where nothing that fits was found within it
_CHUNK = 0.01  # for so much of the bound a search with one chunk more, which takes longer, comes later
_POLL = 0.02  # seconds


@dataclass(frozen=True)
class Findings:
    """What was looked at, what there was no time for, and searches that could not find a shorter step. ``interrupted``:
    by a KeyboardInterrupt, before the budget was spent.
    """

    question: Question
    outcomes: tuple[Outcome, ...]
    estimates: tuple[Estimate, ...]
    not_looked_at: tuple[Candidate, ...]
    needless: tuple[Candidate, ...]
    seconds: float
    interrupted: bool = False

    @property
    def fitting(self) -> list[Outcome]:
        """Those that can be had, fastest first; of equals, the one that needs less memory, and fewer chunks."""
        found = [one for one in self.outcomes if not one.refused]
        return sorted(found, key=lambda one: (round(one.step, 9), one.peak, one.candidate.num_chunks))

    @property
    def best(self) -> Outcome | None:
        """The fastest by Megatron's flags; of those that are as fast, the one that needs the least memory."""
        fitting = self.fitting
        least = min((one.flagged for one in fitting), default=0.0)
        as_fast = [one for one in fitting if one.flagged <= least * (1 + _AS_FAST)]
        return min(as_fast, key=lambda one: (round(one.peak, 6), one.flagged), default=None)

    @property
    def least_memory(self) -> Outcome | None:
        """Of those that were built and may be recommended, the one that needs the least, though it may not fit."""
        built = [one for one in self.outcomes if one.fit is not None and self.question.takes(one.candidate.schedule)]
        return min(built, key=lambda one: one.peak, default=None)

    @property
    def front(self) -> list[Outcome]:
        """The Pareto front: fastest first, each with less memory than all before it."""
        front: list[Outcome] = []
        for one in self.fitting:
            if not front or one.peak < front[-1].peak * (1 - 1e-9):
                front.append(one)
        return front


def search(question: Question, budget: float, jobs: int = 1, report: Report | None = None) -> Findings:
    """The best pipelines for ``question`` that ``jobs`` processes find within ``budget`` seconds, or until a
    KeyboardInterrupt.

    With one job all runs in this process, and what has begun is finished. Raises PlanError where no candidate is
    possible whatever the memory.
    """
    began, found = time.monotonic(), list(candidates(question))
    if not found:
        raise PlanError(f"nothing is left to try: {why_none(question)}")
    found.sort(key=lambda one: not one.searches)  # they take long, so the first of them begins before the rest is known
    searches = sum(one.searches for one in found)
    say = report or (lambda done, of, what: None)
    queue, bounds, interrupted = _Queue(question, budget), dict[Any, float](), False
    evaluator = _Evaluator(question, queue, jobs)
    try:
        with evaluator:
            for k, candidate in enumerate(found):
                say(k, 2 * len(found), f"estimating {candidate}")
                queue.estimates.append(estimate(question, candidate, bounds))
                if k + 1 == searches and jobs > 1 and (first := queue.most_promising_search()):
                    evaluator.start(first)
            queue.sort()
            for done, outcome in enumerate(evaluator.outcomes(began + budget)):
                queue.outcomes.append(outcome)
                say(len(found) + done, 2 * len(found), str(outcome.candidate))
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - began
    known = tuple(queue.outcomes), tuple(queue.estimates)
    return Findings(question, *known, queue.left(found), tuple(queue.needless), seconds, interrupted)


class _Queue:
    """What is looked at next."""

    def __init__(self, question: Question, budget: float) -> None:
        self.question = question
        self.budget = budget
        self.estimates: list[Estimate] = []
        self.outcomes: list[Outcome] = []
        self.waiting: list[Estimate] = []
        self.begun: list[Candidate] = []
        self.needless: list[Candidate] = []

    def most_promising_search(self) -> Candidate | None:
        """By its bound, to be begun now; a chunk more takes longer."""
        searches = [one for one in self.estimates if one.candidate.searches and not one.refused]
        first = min(searches, key=_promise).candidate if searches else None
        self.begun += [first] if first else []
        return first

    def sort(self) -> None:
        """The most promising named plans come first, then searches between the other ones; what cannot be recommended
        is only compared, and comes among these.
        """
        self.outcomes += [Outcome(one.candidate, one.refused) for one in self.estimates if one.refused]
        possible = [one for one in self.estimates if not one.refused and one.candidate not in self.begun]
        fits = [one for one in possible if one.peak <= self.question.memory]
        named = sorted((one for one in possible if not one.candidate.searches), key=lambda one: one.step)
        takes = self.question.takes
        front = _front([one for one in named if one in fits and takes(one.candidate.schedule)])
        searches = sorted((one for one in possible if one.candidate.searches), key=_promise)
        rest = sorted((one for one in named if one not in front), key=lambda one: one.step if fits else one.peak)
        self.waiting = [*front[:2], *_alternately(searches, [*front[2:], *rest])]

    @property
    def best(self) -> float:
        return min((one.step for one in self.outcomes if not one.refused), default=float("inf"))

    def next(self, may_search: bool = True) -> Candidate | None:
        """What to look at now, a search only where it may be, or nothing else waits; None where nothing is left."""
        while self.waiting:
            named = (k for k, one in enumerate(self.waiting) if may_search or not one.candidate.searches)
            one = self.waiting.pop(next(named, 0))
            if one.candidate.searches and one.bound >= self.best * (1 - _GAIN):
                self.needless.append(one.candidate)
            else:
                return one.candidate
        return next(self._variants(), None)

    def _variants(self) -> Iterator[Candidate]:
        """Of the best plan so far, other groups and policies; of a search, with less memory."""
        fitting = [one for one in self.outcomes if not one.refused]
        if not fitting:
            return
        best = min(fitting, key=lambda one: one.step).candidate
        size = self.question.pipeline_size
        groups = [2 * size, best.num_microbatches] if best.family.grouped and best.num_chunks > 1 else []
        found = [replace(best, group_size=group) for group in groups if size < group <= best.num_microbatches]
        found += [replace(best, policy=policy) for policy in self.question.policies[1:]]
        if best.searches:
            found = [replace(best, memory_share=share) for share in (best.memory_share / 2, 1.0)]
        for one in found:
            if one not in self.begun and one != best:
                self.begun.append(one)
                yield one

    def cut_of(self, candidate: Candidate) -> Fitted | None:
        """The model on its stages, as it was estimated."""
        sizes = _sizes(candidate)
        return next((one.cut for one in self.estimates if _sizes(one.candidate) == sizes), None)

    def is_over(self, beyond: float) -> bool:
        """Whether to stop, so many seconds after the end of the budget; later where nothing fits so far, and not before
        a plan was built that may be recommended.
        """
        if self.best < float("inf"):
            return beyond > 0
        return beyond > _EXTRA * self.budget and any(
            one.fit is not None and self.question.takes(one.candidate.schedule) for one in self.outcomes
        )

    def left(self, found: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Of ``found``, and of the variants that were begun, those without an outcome."""
        known = {*(one.candidate for one in self.outcomes), *self.needless}
        return tuple(one for one in dict.fromkeys([*found, *self.begun]) if one not in known)


def _sizes(candidate: Candidate) -> tuple[Any, ...]:
    """What candidates have in common whose model is cut the same way."""
    sizes = candidate.num_chunks, candidate.micro_batch, candidate.slices
    return candidate.schedule, *sizes, candidate.offload_chunks


def _front(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Of those that are sorted by step, each that needs less memory than all before it."""
    front: list[Estimate] = []
    for one in estimates:
        if not front or one.peak < front[-1].peak:
            front.append(one)
    return front


def _alternately(first: Sequence[Estimate], second: Sequence[Estimate]) -> list[Estimate]:
    """One of ``first``, then three of ``second``, and so on."""
    result, others = [], list(second)
    for one in first:
        result += [one, *others[:3]]
        del others[:3]
    return [*result, *others]


def _promise(one: Estimate) -> tuple[float, float]:
    return one.bound * (1 + _CHUNK * one.candidate.num_chunks), one.peak


class _Evaluator:
    """``jobs`` at a time, each in a process of its own; what runs when the budget is spent is ended. One job runs in
    this process, and is finished.
    """

    def __init__(self, question: Question, queue: _Queue, jobs: int) -> None:
        self.question = question
        self.queue = queue
        self.jobs = jobs
        self.running: dict[Candidate, AsyncResult[Outcome]] = {}

    def __enter__(self) -> None:
        if self.jobs > 1:  # Ctrl-C reaches the whole group of processes: only this one has an answer to give
            ignore = (signal.SIGINT, signal.SIG_IGN)
            self.pool = multiprocessing.get_context("spawn").Pool(self.jobs, signal.signal, ignore)

    def __exit__(self, *error: object) -> None:
        if self.jobs > 1:
            self.pool.terminate()
            self.pool.join()

    def start(self, candidate: Candidate) -> None:
        work = self.question, candidate, self.queue.cut_of(candidate)
        self.running[candidate] = self.pool.apply_async(evaluate, work)

    def outcomes(self, until: float) -> Iterator[Outcome]:
        queue, running = self.queue, self.running
        while True:
            while len(running) < self.jobs:
                searches = sum(one.searches for one in running)
                candidate = queue.next(may_search=searches < max(1, self.jobs - 1))
                if candidate is None:
                    break
                if self.jobs > 1:
                    self.start(candidate)
                else:
                    yield evaluate(self.question, candidate, queue.cut_of(candidate))
                    if queue.is_over(time.monotonic() - until):
                        return
            if not running:
                return
            done = [candidate for candidate, result in running.items() if result.ready()]
            for candidate in done:
                yield running.pop(candidate).get()
            if queue.is_over(time.monotonic() - until):
                return
            if not done:
                time.sleep(_POLL)

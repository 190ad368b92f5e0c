"""The search for the best pipeline: all candidates are estimated, then built, verified and simulated, the most
promising first, for as long as the budget lasts.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult
from typing import Any

from megatron_pp.plan.advise.candidates import Candidate, Estimate, candidates, estimate
from megatron_pp.plan.advise.evaluate import Outcome, evaluate
from megatron_pp.plan.advise.fit import Fitted
from megatron_pp.plan.advise.question import Question

Report = Callable[[int, int, str], None]
"""Takes how many candidates are done, of how many, and what is looked at."""

_GAIN = 0.002  # a search whose bound is not this much below the best step is not worth its time
_AS_FAST = 1e-3  # steps that differ by less are told apart by their memory
_EXTRA = 1.0  # of the budget, where nothing that fits was found within it
_POLL = 0.02  # seconds


@dataclass(frozen=True)
class Findings:
    """What was looked at, and what there was no time for."""

    question: Question
    outcomes: tuple[Outcome, ...]
    estimates: tuple[Estimate, ...]
    not_looked_at: tuple[Candidate, ...]
    seconds: float

    @property
    def fitting(self) -> list[Outcome]:
        """Those that can be had, fastest first; of equals, the one that needs less memory, and fewer chunks."""
        found = [one for one in self.outcomes if not one.refused]
        return sorted(found, key=lambda one: (round(one.step, 9), one.peak, one.candidate.num_chunks))

    @property
    def best(self) -> Outcome | None:
        """The fastest; of those that are as fast, the one that needs the least memory."""
        fitting = self.fitting
        as_fast = [one for one in fitting if one.step <= fitting[0].step * (1 + _AS_FAST)]
        return min(as_fast, key=lambda one: (round(one.peak, 6), one.step), default=None)

    @property
    def front(self) -> list[Outcome]:
        """The Pareto front: fastest first, each with less memory than all before it."""
        front: list[Outcome] = []
        for one in self.fitting:
            if not front or one.peak < front[-1].peak * (1 - 1e-9):
                front.append(one)
        return front


def search(question: Question, budget: float, jobs: int = 1, report: Report | None = None) -> Findings:
    """The best pipelines for ``question`` that ``jobs`` processes find within ``budget`` seconds.

    With one job all runs in this process, and what has begun is finished. Raises PlanError where no candidate is
    possible whatever the memory.
    """
    began = time.monotonic()
    say = report or (lambda done, of, what: None)
    estimates, bounds = [], dict[Any, float]()
    found = list(candidates(question))
    for k, candidate in enumerate(found):
        say(k, 2 * len(found), f"estimating {candidate}")
        estimates.append(estimate(question, candidate, bounds))
    queue = _Queue(question, estimates, budget)
    evaluator = _in_processes if jobs > 1 else _in_turn
    for done, outcome in enumerate(evaluator(question, queue, began + budget, jobs)):
        queue.add(outcome)
        say(len(found) + done, 2 * len(found), str(outcome.candidate))
    return Findings(question, tuple(queue.outcomes), tuple(estimates), tuple(queue.left()), time.monotonic() - began)


class _Queue:
    """What is looked at next."""

    def __init__(self, question: Question, estimates: Sequence[Estimate], budget: float) -> None:
        self.question = question
        self.budget = budget
        self.outcomes = [Outcome(one.candidate, one.refused) for one in estimates if one.refused]
        possible = [one for one in estimates if not one.refused]
        fits = [one for one in possible if one.peak <= question.memory]
        named = sorted((one for one in possible if not one.candidate.searches), key=lambda one: one.step)
        front = _front([one for one in named if one in fits])
        # The most promising named plans, then searches, the quickest first, between the other named ones.
        searches = [one for one in possible if one.candidate.searches]
        searches.sort(key=lambda one: (one.candidate.num_chunks * one.candidate.num_microbatches, one.step))
        rest = sorted((one for one in named if one not in front), key=lambda one: one.step if fits else one.peak)
        self.waiting = [*front[:2], *_alternately(searches, [*front[2:], *rest])]
        self.cuts = {_sizes(one.candidate): one.cut for one in possible}
        self.variants_of: set[Candidate] = set()
        self.unfinished: list[Candidate] = []

    @property
    def best(self) -> float:
        return min((one.step for one in self.outcomes if not one.refused), default=float("inf"))

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def next(self) -> Candidate | None:
        """What to look at now; None where nothing is left."""
        while self.waiting:
            one = self.waiting.pop(0)
            if not (one.candidate.searches and one.bound >= self.best * (1 - _GAIN)):
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
            if one not in self.variants_of and one != best:
                self.variants_of.add(one)
                yield one

    def cut_of(self, candidate: Candidate) -> Fitted | None:
        """The model on its stages, as it was estimated."""
        return self.cuts.get(_sizes(candidate))

    def is_over(self, beyond: float) -> bool:
        """Whether to stop, so many seconds after the end of the budget; later where nothing fits so far."""
        return beyond > (0.0 if self.best < float("inf") else _EXTRA * self.budget)

    def give_up(self, running: Iterable[Candidate]) -> None:
        """There was no time for these."""
        self.unfinished += running

    def left(self) -> list[Candidate]:
        return [*self.unfinished, *(one.candidate for one in self.waiting)]


def _sizes(candidate: Candidate) -> tuple[str, int, int, int]:
    """What candidates have in common whose model is cut the same way."""
    return candidate.schedule, candidate.num_chunks, candidate.micro_batch, candidate.slices


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


def _in_turn(question: Question, queue: _Queue, until: float, jobs: int) -> Iterator[Outcome]:
    while (candidate := queue.next()) is not None:
        yield evaluate(question, candidate, queue.cut_of(candidate))
        if queue.is_over(time.monotonic() - until):
            return


def _in_processes(question: Question, queue: _Queue, until: float, jobs: int) -> Iterator[Outcome]:
    """What runs when the budget is spent is ended."""
    running: dict[Candidate, AsyncResult[Outcome]] = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        while True:
            while len(running) < jobs and (candidate := queue.next()) is not None:
                running[candidate] = pool.apply_async(evaluate, (question, candidate, queue.cut_of(candidate)))
            if not running:
                return
            done = [candidate for candidate, result in running.items() if result.ready()]
            for candidate in done:
                yield running.pop(candidate).get()
            if queue.is_over(time.monotonic() - until):
                queue.give_up(running)
                return
            if not done:
                time.sleep(_POLL)

"""The process that plans later steps than the one that runs: one of each rank, so that no search holds up training.

All ranks ask the same and get the same answer, so none waits for another's. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron_pp.common.child_process import Child, answer_questions
from megatron_pp.errors import PipelineError
from megatron_pp.features.packing.proposal import Proposal
from megatron_pp.features.packing.step_ahead import NextStep, StepAhead, plan_ahead
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.io.serialize import spec_from_values, spec_values

_NICE = 5


class Planner:
    """Plans steps one after the other in a process of its own, which begins with the first question. ``what``: the
    steps, in words."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.child: Child | None = None

    def ask(self, number: int, step: NextStep) -> None:
        """Begins to plan ``step``, which has this number."""
        if self.child is None:
            self.child = Child(__name__)
        self.child.ask({"number": number, **question_of(step)})

    def answer(self, number: int, seconds: float | None = None, check: Callable[[], None] = lambda: None) -> StepAhead:
        """What was found for the step of this number; waits for it, for ``seconds`` at most, and calls ``check`` in
        between, which may raise. Raises PipelineError where the process has ended, does not answer, or could not plan.
        After any of these it can be asked for again."""
        assert self.child is not None
        try:
            while True:
                found = self.child.answer(seconds, check)
                if found.pop("number") == number:
                    return found_in(found)
        except (ChildProcessError, TimeoutError) as error:
            raise PipelineError(f"the process that plans {self.what} {error}") from error
        except PipelineError:  # of ``check``
            raise
        except RuntimeError as error:
            raise PipelineError(f"{self.what} could not be planned: {error}") from error


def question_of(step: NextStep) -> dict[str, Any]:
    return {**vars(step), "spec": spec_values(step.spec), "measured": step.measured and asdict(step.measured)}


def step_of(question: dict[str, Any]) -> NextStep:
    measured = question["measured"]
    values = {
        "spec": spec_from_values(question["spec"]),
        "costs": tuple(question["costs"]),
        "measured": None if measured is None else Measured.from_dict(measured),
    }
    return NextStep(**question | values)


def answer_of(found: StepAhead) -> dict[str, Any]:
    proposal = None if found.proposal is None else found.proposal.to_dict()
    return {"order": found.order, "proposal": proposal, "kept": found.kept}


def found_in(answer: dict[str, Any]) -> StepAhead:
    proposal = None if answer["proposal"] is None else Proposal.from_dict(answer["proposal"])
    return StepAhead(tuple(answer["order"]), proposal, answer["kept"])


def answered(question: dict[str, Any]) -> dict[str, Any]:
    number = question.pop("number")
    return {"number": number, **answer_of(plan_ahead(step_of(question)))}


def main() -> None:
    answer_questions(answered, _NICE)

"""A process that plans later steps while one step runs. Each rank has its own, so that no search delays training.

All ranks ask the same questions and get the same answers, so no rank waits for the answer of another. This module never
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_pp.common.child_process import Child, answer_questions
from megatron_pp.errors import PipelineError
from megatron_pp.features.packing.proposal import Proposal
from megatron_pp.features.packing.step_ahead import NextStep, StepAhead, plan_ahead
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.io.serialize import spec_from_values, spec_values
from megatron_pp.plan.ir.feature import all_values

_NICE = 5


class Planner:
    """Plans steps one after the other in a process of its own, which starts with the first question. ``what``: a name
    of the steps, for errors."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.child: Child | None = None

    def ask(self, number: int, step: NextStep) -> None:
        """Begin to plan ``step``, whose number is ``number``."""
        if self.child is None:
            self.child = Child(__name__)
        self.child.ask({"number": number, **question_of(step)})

    def answer(self, number: int, seconds: float | None = None, check: Callable[[], None] = lambda: None) -> StepAhead:
        """Wait for the plan of step ``number``, for at most ``seconds``, and return it. Calls ``check`` in between,
        which may raise. Raises PipelineError if the process has ended, does not answer, or could not plan. After any of
        these the same step can be asked for again."""
        assert self.child is not None
        try:
            while True:
                found = self.child.answer(seconds, check)
                if found.pop("number") == number:
                    return found_in(found)
        except (ChildProcessError, TimeoutError) as error:
            raise PipelineError(f"the process that plans {self.what} {error}") from error
        except PipelineError:  # raised by ``check``
            raise
        except RuntimeError as error:
            raise PipelineError(f"{self.what} could not be planned: {error}") from error


def question_of(step: NextStep) -> dict[str, Any]:
    return {**vars(step), "spec": spec_values(step.spec), "measured": step.measured and all_values(step.measured)}


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

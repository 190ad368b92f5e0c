"""The process that plans the step after the one that runs: one of each rank, so that no search holds up training.

A line of JSON asks, a line of JSON answers; it ends with the rank. All ranks ask the same and get the same answer, so
none waits for another's. Never imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_pp.errors import PipelineError
from megatron_pp.plan.costs.measured import Measured
from megatron_pp.plan.io.serialize import spec_from_values, spec_values
from megatron_pp.planner.replan import Proposal
from megatron_pp.planner.step_ahead import NextStep, StepAhead, plan_ahead

_COMMAND = "import sys; from megatron_pp.features.packing.ahead import main; main()"
_NICE = 5


class Planner:
    """Plans steps one after the other in a process of its own, which begins with the first question."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, step: NextStep) -> None:
        """Begins to plan ``step``; its answer is what ``answer`` returns next."""
        if self._process is None:
            place = str(Path(__file__).resolve().parents[3])
            paths = os.pathsep.join(path for path in (place, os.environ.get("PYTHONPATH")) if path)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND],
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which ``answer`` says
            self._process.stdin.write(question_text(step))
            self._process.stdin.flush()

    def answer(self) -> StepAhead:
        """Waits for it. Raises PipelineError where the process has ended or could not plan."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise PipelineError(f"the process that plans the next step of packed sequences ended with code {code}")
        return read_answer(line)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def question_text(step: NextStep) -> str:
    values = {**vars(step), "spec": spec_values(step.spec), "measured": step.measured and asdict(step.measured)}
    return json.dumps(values) + "\n"


def read_question(text: str) -> NextStep:
    values: dict[str, Any] = json.loads(text)
    measured = values["measured"]
    values |= {
        "spec": spec_from_values(values["spec"]),
        "costs": tuple(values["costs"]),
        "measured": None if measured is None else Measured.from_dict(measured),
    }
    return NextStep(**values)


def answer_text(found: StepAhead) -> str:
    proposal = None if found.proposal is None else found.proposal.to_dict()
    return json.dumps({"order": found.order, "proposal": proposal, "kept": found.kept}) + "\n"


def read_answer(text: str) -> StepAhead:
    """Raises PipelineError where the step could not be planned."""
    content = json.loads(text)
    if "error" in content:
        raise PipelineError(f"the next step of packed sequences could not be planned: {content['error']}")
    proposal = content["proposal"]
    return StepAhead(
        tuple(content["order"]), None if proposal is None else Proposal.from_dict(proposal), content["kept"]
    )


def main() -> None:
    """Answers line by line, until the standard input ends."""
    if hasattr(os, "nice"):
        os.nice(_NICE)
    for line in sys.stdin:
        try:
            text = answer_text(plan_ahead(read_question(line)))
        except Exception as error:  # the rank raises it
            text = json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n"
        sys.stdout.write(text)
        sys.stdout.flush()

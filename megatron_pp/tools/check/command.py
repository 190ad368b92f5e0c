"""Runs a check: makes the sections of its answer in their order, its exit code and its JSON."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_pp.errors import MegatronPPError
from megatron_pp.tools.advise.layers.gpus import Gpu
from megatron_pp.tools.check.findings import ERROR, LEVELS, NOTE, RISK, SECTIONS, Finding, Section
from megatron_pp.tools.check.jobs.job import Job

NOTHING = 0
FAILS = 1
RISKS = 3
"""Exit codes: nothing found; the job would fail or compute wrongly; only risks found."""
_MODULES = {"time": "step_time"}
"""Section -> its module, if the module has another name."""
_BESIDE_GPU = ("memory", "time")


@dataclass(frozen=True)
class Answer:
    job: Job
    sections: tuple[Section, ...]

    def findings(self, level: str = "") -> list[Finding]:
        """All findings, or the findings of one level."""
        found = [one for section in self.sections for one in section.findings]
        return [one for one in found if level in ("", one.level)]

    def exit_code(self, strict: bool = False) -> int:
        if self.findings(ERROR):
            return FAILS
        if self.findings(RISK):
            return FAILS if strict else RISKS
        return NOTHING

    def to_json(self, strict: bool = False) -> dict[str, Any]:
        """The answer as JSON values: the job, the data and findings of each section, and the exit code."""
        job = asdict(replace(self.job, found=()))
        job.pop("found")
        sections = {
            section.name: {
                "lines": list(section.lines),
                "data": section.data,
                "findings": [asdict(one) for one in section.findings],
            }
            for section in self.sections
        }
        return {"job": job, "sections": sections, "exit_code": self.exit_code(strict)}


def check(job: Job, gpu: Gpu | None, numbers: Callable[[], Section] | None = None) -> Answer:
    """The answer with all its sections.

    ``gpu`` is the card that the job runs on, None if it is not known. ``numbers``, if given, compares the job with one
    process and makes the section of the same name.
    """
    sections = [_answered(name, job, gpu) for name in SECTIONS if name != "numbers"]
    if numbers is not None:
        sections.append(numbers())
    return Answer(job, tuple(_with_read(sections, job.found)))


def _answered(name: str, job: Job, gpu: Gpu | None) -> Section:
    """One section. If it raises, the error becomes its finding, so that the other sections are still shown."""
    module = f"megatron_pp.tools.check.{_MODULES.get(name, name)}"
    if importlib.util.find_spec(module) is None:
        return Section(name)
    answer: Any = importlib.import_module(module).section
    try:
        section: Section = answer(job, gpu) if name in _BESIDE_GPU else answer(job)
    except MegatronPPError as error:
        why = str(error)
    except Exception as error:  # a fault of this command; the job was not checked and may be right
        why = f"{type(error).__name__}: {error}"
    else:
        return section
    return Section(name, findings=(Finding("not-answered", RISK, f"{name} cannot be answered: {why}"),))


def _with_read(sections: Sequence[Section], found: Sequence[Finding]) -> list[Section]:
    """The sections with the notes that reading found, in front of the findings of "layout". The section "start" has the
    other findings of reading."""
    notes = tuple(one for one in found if one.level == NOTE)
    return [
        replace(section, findings=(*notes, *section.findings)) if section.name == "layout" else section
        for section in sections
    ]


def sorted_findings(section: Section) -> list[Finding]:
    """The findings of a section, the worst first."""
    return sorted(section.findings, key=lambda one: LEVELS.index(one.level))

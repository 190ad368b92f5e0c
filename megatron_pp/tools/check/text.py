"""The answer of a check as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_pp.tools.check.command import Answer, sorted_findings
from megatron_pp.tools.check.findings import LEVELS, Finding
from megatron_pp.tools.check.jobs.job import Job

_TITLES = {
    "layout": "Layout",
    "start": "Start",
    "risks": "Known faults",
    "memory": "Memory",
    "time": "Time",
    "hangs": "Hangs",
    "numbers": "Numbers",
}


def lines_of(answer: Answer) -> Iterator[tuple[str, int]]:
    """Each line, and the columns by which its continuation is indented on a narrow terminal."""
    yield headline(answer.job), 4
    for section in answer.sections:
        if not section.lines and not section.findings:
            continue
        yield "", 0
        yield _TITLES.get(section.name, section.name), 0
        for line in section.lines:
            yield f"  {line}".rstrip(), 4
        for finding in sorted_findings(section):
            for text in _of_finding(finding):
                yield text, 9
    yield "", 0
    yield summary(answer), 0


def headline(job: Job) -> str:
    release = f", Megatron-core {job.release}" if job.release else ""
    engine = " on this engine" if job.on_engine else ""
    how = "read by Megatron's own parser and checks" if job.validated else "read without Megatron's checks"
    return f"{job.source}: {job.framework}{engine} on {job.gpus} GPU{'s' * (job.gpus != 1)}{release}, {how}"


def _of_finding(finding: Finding) -> Iterator[str]:
    yield f"  {finding.level + ':':<6} {finding.text}"
    if finding.change:
        yield f"         change: {finding.change}"
    for thread in finding.threads:
        yield f"         {thread}"


def summary(answer: Answer) -> str:
    counts = [(len(answer.findings(level)), level) for level in LEVELS]
    parts = [f"{count} {level}{'s' * (count != 1)}" for count, level in counts if count]
    return ", ".join(parts) if parts else "nothing found"

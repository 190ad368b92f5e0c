"""The section "start": all errors that would end a job at its start or in its first step.

If Megatron's own checks have run, reading has found their refusals. The rules find the same faults without these
checks, and more, such as numbers that a schedule refuses in its first step. Rules also know a right value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_pp.tools.check.findings import NOTE, Finding, Section
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.rules import RULES


def section(job: Job) -> Section:
    """The refusals that reading found, each with the right value that a rule knows, then the other findings of
    rules."""
    of_rules = [*_found_by_rules(job)]
    findings: list[Finding] = []
    used: set[str] = set()
    for read in (one for one in job.found if one.level != NOTE):
        same = next((one for one in of_rules if one.name not in used and _are_of_one_thing(read, one)), None)
        if same is None:
            findings.append(read)
            continue
        used.add(same.name)
        findings.append(replace(read, change=read.change or same.change))
    findings += [one for one in of_rules if one.name not in used]
    return Section("start", (), tuple(findings), {"validated": job.validated})


def _found_by_rules(job: Job) -> Iterator[Finding]:
    for rule in RULES:
        for text, change in rule.broken(job):
            yield Finding(rule.name, rule.level, text, change, rule.settings)


def _are_of_one_thing(read: Finding, rule: Finding) -> bool:
    """Whether both findings are about one fault: they have two settings in common, or the only setting of one."""
    ours = set(rule.settings)
    theirs = set(read.settings)
    return len(ours & theirs) >= min(2, len(ours), len(theirs)) > 0

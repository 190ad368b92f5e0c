"""What would end a job at its start or in its first step: every refusal of Megatron's and of this engine's, at once.

Where Megatron's own checks have run, their refusals are known from reading. The rules below find the same and more
without them, such as what a schedule refuses in its first step, and say which value would be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_pp.tools.check.findings import NOTE, Finding, Section
from megatron_pp.tools.check.jobs.job import Job
from megatron_pp.tools.check.rules import RULES


def section(job: Job) -> Section:
    """Refusals of Megatron's that reading found, each with the value that a rule knows, then those of rules alone."""
    of_rules = [*_found_by_rules(job)]
    findings, used = [], set()
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
    """Whether Megatron's refusal reads two settings of the rule, or its only one."""
    ours, theirs = set(rule.settings), set(read.settings)
    return len(ours & theirs) >= min(2, len(ours), len(theirs)) > 0

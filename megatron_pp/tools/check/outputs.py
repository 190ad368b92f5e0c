"""The answer of a check for other programs: a JUnit file, and annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree as Xml

from megatron_pp.errors import visible
from megatron_pp.tools.check.command import Answer, sorted_findings
from megatron_pp.tools.check.findings import ERROR, NOTE, RISK, Finding
from megatron_pp.tools.junit import case_in, suite_of, text_of

_COMMAND = "check"
_ANNOTATIONS = {ERROR: "error", RISK: "warning", NOTE: "notice"}


def junit_of(answer: Answer, strict: bool) -> str:
    """A JUnit file with a test case for each section. It fails if the section has an error, or with ``strict`` a
    risk."""
    levels = (ERROR, RISK) if strict else (ERROR,)
    failed = {one.name: [f for f in sorted_findings(one) if f.level in levels] for one in answer.sections}
    suite = suite_of(_COMMAND, len(answer.sections), sum(map(bool, failed.values())), 0)
    for section in answer.sections:
        case = case_in(suite, _COMMAND, section.name)
        if failed[section.name]:
            lines = [in_words(finding) for finding in failed[section.name]]
            Xml.SubElement(case, "failure", message=visible(lines[0])).text = visible("\n".join(lines))
        rest = [*section.lines, *(in_words(one) for one in section.findings if one not in failed[section.name])]
        if rest:
            Xml.SubElement(case, "system-out").text = visible("\n".join(rest))
    return text_of(suite)


def junit_of_error(message: str) -> str:
    """A JUnit file with an error, if there is no answer."""
    suite = suite_of(_COMMAND, 1, 0, 1)
    Xml.SubElement(case_in(suite, _COMMAND, "read"), "error", message=visible(message)).text = visible(message)
    return text_of(suite)


def in_words(finding: Finding) -> str:
    change = f"; change: {finding.change}" if finding.change else ""
    return f"{finding.level}: {finding.text}{change}{''.join(f' {thread}' for thread in finding.threads)}"


def annotations_of(answer: Answer) -> Iterator[str]:
    """A line for each finding. GitHub Actions shows it as an annotation of the run."""
    for section in answer.sections:
        for finding in sorted_findings(section):
            title = _escaped(f"{section.name}: {finding.name}").replace(":", "%3A").replace(",", "%2C")
            text = in_words(finding).removeprefix(f"{finding.level}: ")
            yield f"::{_ANNOTATIONS[finding.level]} title={title}::{_escaped(text)}"


def annotation_of_error(message: str) -> str:
    return f"::error title=megatron-pp check::{_escaped(message)}"


def _escaped(text: str) -> str:
    """The text with line breaks escaped: for GitHub a line is one annotation."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

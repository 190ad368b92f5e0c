"""A JUnit file with a test case for each engine. The case fails if the layout differs, and is an error if there is no
answer."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as Xml

from megatron_pp.errors import visible
from megatron_pp.tools import junit
from megatron_pp.tools.parity.answers.verdicts import DIFFERENT, NOT_EXERCISED

if TYPE_CHECKING:
    from megatron_pp.tools.parity.answers.answer import Answer


_COMMAND = "parity"


def text_of(answer: Answer) -> str:
    failures = [engine for engine, one in answer.compared.items() if one.verdict == DIFFERENT]
    errors = [engine for engine in answer.compared if engine not in failures and answer.verdict == NOT_EXERCISED]
    suite = junit.suite_of(_COMMAND, len(answer.compared), len(failures), len(errors))
    for engine in answer.compared:
        case = junit.case_in(suite, _COMMAND, f"{answer.layout.label()}, {engine}")
        for tag in ("failure",) * (engine in failures) + ("error",) * (engine in errors):
            lines = [visible(line) for line in answer.lines()]
            Xml.SubElement(case, tag, message=lines[0]).text = "\n".join(lines)
    return junit.text_of(suite)


def text_of_error(message: str) -> str:
    """A JUnit file with an error, if there is no answer."""
    suite = junit.suite_of(_COMMAND, 1, 0, 1)
    lines = visible(message)
    Xml.SubElement(junit.case_in(suite, _COMMAND, "parity"), "error", message=lines.partition("\n")[0]).text = lines
    return junit.text_of(suite)

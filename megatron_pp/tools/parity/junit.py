"""A JUnit file: one test case for each engine. It fails where the layout differs, and is an error without an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as Xml

from megatron_pp.errors import visible
from megatron_pp.tools.parity.verdicts import DIFFERENT, NOT_EXERCISED

if TYPE_CHECKING:
    from megatron_pp.tools.parity.answer import Answer


def text_of(answer: Answer) -> str:
    failures = [engine for engine, one in answer.compared.items() if one.verdict == DIFFERENT]
    errors = [engine for engine in answer.compared if engine not in failures and answer.verdict == NOT_EXERCISED]
    suite = _suite(len(answer.compared), len(failures), len(errors))
    for engine in answer.compared:
        case = _case(suite, f"{answer.layout.label()}, {engine}")
        for tag in ("failure",) * (engine in failures) + ("error",) * (engine in errors):
            lines = [visible(line) for line in answer.lines()]
            Xml.SubElement(case, tag, message=lines[0]).text = "\n".join(lines)
    return _written(suite)


def text_of_error(message: str) -> str:
    """Where there is no answer."""
    suite = _suite(1, 0, 1)
    lines = visible(message)
    Xml.SubElement(_case(suite, "parity"), "error", message=lines.partition("\n")[0]).text = lines
    return _written(suite)


def _suite(tests: int, failures: int, errors: int) -> Xml.Element:
    suite = Xml.Element("testsuite", name="megatron-pp parity", tests=str(tests))
    suite.set("failures", str(failures))
    suite.set("errors", str(errors))
    return suite


def _case(suite: Xml.Element, name: str) -> Xml.Element:
    return Xml.SubElement(suite, "testcase", classname="megatron_pp.tools.parity", name=visible(name))


def _written(suite: Xml.Element) -> str:
    return Xml.tostring(suite, encoding="unicode", xml_declaration=True)

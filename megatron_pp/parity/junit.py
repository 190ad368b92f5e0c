"""A JUnit file: one test case for each engine, which fails where the layout differs."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

from megatron_pp.parity.answer import Answer
from megatron_pp.parity.comparison import DIFFERENT


def text_of(answer: Answer) -> str:
    failures = [engine for engine, one in answer.compared.items() if one.verdict == DIFFERENT]
    suite = Xml.Element("testsuite", name="megatron-pp parity", tests=str(len(answer.compared)))
    suite.set("failures", str(len(failures)))
    for engine in answer.compared:
        case = Xml.SubElement(
            suite, "testcase", classname="megatron_pp.parity", name=f"{answer.layout.label()}, {engine}"
        )
        if engine in failures:
            lines = answer.lines()
            Xml.SubElement(case, "failure", message=lines[0]).text = "\n".join(lines)
    return Xml.tostring(suite, encoding="unicode", xml_declaration=True)

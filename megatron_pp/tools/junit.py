"""JUnit files of the commands: a suite, and its test cases."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

from megatron_pp.errors import visible


def suite_of(command: str, tests: int, failures: int, errors: int) -> Xml.Element:
    """The suite of ``megatron-pp COMMAND`` with its counts. Cases are added by ``case_in``."""
    suite = Xml.Element("testsuite", name=f"megatron-pp {command}", tests=str(tests))
    suite.set("failures", str(failures))
    suite.set("errors", str(errors))
    return suite


def case_in(suite: Xml.Element, command: str, name: str) -> Xml.Element:
    return Xml.SubElement(suite, "testcase", classname=f"megatron_pp.tools.{command}", name=visible(name))


def text_of(suite: Xml.Element) -> str:
    return Xml.tostring(suite, encoding="unicode", xml_declaration=True)

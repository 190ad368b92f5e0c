"""docs/troubleshooting.md names every public error, and only messages that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from megatron_pp import errors
from testkit.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def _texts(tree: ast.AST) -> Iterator[str]:
    """The string constants of a module, with "..." for each value in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d)?[dfgs]", "...", node.value)


@pytest.fixture(scope="module")
def source() -> list[str]:
    files = (ROOT / "megatron_pp").rglob("*.py")
    return [text for file in files for text in _texts(ast.parse(file.read_text()))]


def _messages() -> list[str]:
    cells = re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def test_every_public_error_has_an_entry() -> None:
    headings = re.findall(r"^### `(\w+)`$", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(errors.__all__)


@pytest.mark.parametrize("message", _messages())
def test_the_code_has_the_message(source: list[str], message: str) -> None:
    assert any(message in text for text in source), "no text of the package has it"

"""Finds the shell commands and the Python code on pages, which a reader may type."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_SHELLS = ("bash", "sh", "shell", "console")
_FENCE = re.compile(r"^( *)```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:(?<=\n\n)|(?<=-->\n))(?:    .*\n(?:\n+(?=    ))?)+")
_COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:megatron-pp|torchrun|python|pip|git|docker|for|export|train\.py|\.ci/run|\S*scripts/\S+) "
)


class Printed(NamedTuple):
    """One command or code block. ``text``: a command without comments, or Python. ``title``: that of the block."""

    page: str
    language: str  # "shell" or "python"
    text: str
    title: str = ""

    @property
    def name(self) -> str:
        """The name of the block in tables: the title, or the first line."""
        return self.title or self.text.splitlines()[0]


def pages() -> list[str]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.name != "CHANGELOG.md")


def printed(page: str) -> list[Printed]:
    """The commands and Python blocks of a page, in order: fenced blocks of a shell or of Python, and indented
    blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [(block.start(), *block.group(2, 3, 4)) for block in _FENCE.finditer(text)]
    rest = _FENCE.sub(lambda block: re.sub(r"[^\n]", "x", block[0]), text)  # of the same length, without code
    found += [(block.start(), "", None, block[0]) for block in _INDENTED.finditer(rest)]
    return [one for _, language, title, code in sorted(found) for one in _of_block(page, language, title, code)]


def _of_block(page: str, language: str, title: str | None, code: str) -> Iterator[Printed]:
    code = textwrap.dedent(code)
    lines = re.sub(r"\\\n *", "", code).splitlines()
    if language == "python" or (not language and _is_python(code)):
        yield Printed(page, "python", code, title or "")
    elif language in _SHELLS or not language:
        for line in lines:
            command = re.sub(r"(^|\s{2,}|\s(?=# [a-z]))#.*", "", line).strip().removeprefix("$ ")
            if language or _COMMAND.match(f"{command} "):
                yield from [Printed(page, "shell", command)] if command else ()


def _is_python(code: str) -> bool:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return False
    kinds = (ast.Call, ast.Import, ast.ImportFrom, ast.Attribute, ast.ClassDef)
    return any(isinstance(node, kinds) for node in ast.walk(tree))


def names_from_elsewhere(code: str) -> set[str]:
    """The names that a block of Python uses without defining them. Such a block cannot run alone."""
    table = symtable.symtable(code, "page", "exec")
    made = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    return {name for name in _used(table) if name not in made and not hasattr(builtins, name)}


def _used(table: symtable.SymbolTable) -> Iterator[str]:
    at_top = table.get_type() == "module"
    yield from (one.get_name() for one in table.get_symbols() if one.is_referenced() and (at_top or one.is_global()))
    for child in table.get_children():
        yield from _used(child)

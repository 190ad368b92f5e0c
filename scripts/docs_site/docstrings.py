"""Docstrings as Markdown: lines of ``name   what it is`` become lists. An extension of griffe; see mkdocs.yml."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_FIELD = re.compile(r"(\w+(?:, \w+)*) {2,}(\S.*)")


class FieldLists(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """``text`` with list items in place of lines that have a name, two or more spaces, and words."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        field = _FIELD.fullmatch(line)
        if field:
            if not in_list:
                lines.append("")
            lines.append(f"- `{field[1]}`: {field[2]}")
        elif in_list and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            if in_list:
                lines.append("")
            lines.append(line)
        in_list = bool(field) or (in_list and line.startswith("  "))
    return "\n".join(lines)

"""Flags of programs whose parsers are not known: names with underscores, and values as they look."""

from collections.abc import Sequence
from typing import Any


def values_of_words(words: Sequence[str]) -> dict[str, Any]:
    """Flag -> value: True for a switch, a number or a truth value where it looks like one, a list of several words.
    Words before the first flag are left out."""
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = _value(value) if equals else True
            name = "" if equals else name
        elif name:
            before = found[name]
            if before is True:
                found[name] = _value(word)
            else:
                found[name] = [*before, word] if isinstance(before, list) else [str(before), word]
    return found


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

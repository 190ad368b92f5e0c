"""Reads the flags of programs whose parsers are not known. The look of a value decides its type."""

from collections.abc import Sequence
from typing import Any

from megatron_pp.tools.flags.flags import Flags


def values_of_words(words: Sequence[str]) -> dict[str, Any]:
    """Flag, written with underscores -> its value.

    A switch has the value True. A value that looks like a number, a truth value or None is one. Several words are a
    list of text. Words before the first flag are left out.
    """
    found: dict[str, Any] = {}
    for flag, values in Flags.read(words).items:
        name = flag.removeprefix("--").replace("-", "_")
        if name:
            found[name] = True if not values else _value(values[0]) if len(values) == 1 else [*values]
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

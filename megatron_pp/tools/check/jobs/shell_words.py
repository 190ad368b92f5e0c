"""Words of a shell script: what a shell makes of the variables in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# The value after ``:-`` may have a variable in braces, as in ``${MODEL:-${HOME}/model}``.
_USED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)")


def expanded(word: str, variables: Mapping[str, Sequence[str]]) -> list[str]:
    """The words that the shell would make of a word of the script. A word that is only a variable may become
    several."""
    whole = _USED.fullmatch(word)
    if whole is not None:
        name = whole[1] or whole[3]
        if name in variables:
            return [each for value in variables[name] for each in value.split()]
        return [_default(whole[2].strip("\"'"), variables)] if whole[2] is not None else [word]

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        if name in variables:
            return " ".join(variables[name])
        return _default(found[2], variables) if found[2] is not None else found[0]

    replaced = _USED.sub(value, word)
    return replaced.split() if replaced != word and word.lstrip().startswith(("-", "$")) else [replaced]


def _default(text: str, variables: Mapping[str, Sequence[str]]) -> str:
    return " ".join(expanded(text, variables))

"""Which branches of a shell script run, as far as that is known without running a command.

Comparisons of variables that the script sets are decided: ``[[ ]]``, ``[ ]``, ``test`` and the patterns of a ``case``.
Tests of files, other commands, and variables from outside the script are not: such a condition is None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from megatron_pp.tools.check.jobs.shell_words import expanded

Variables = Mapping[str, Sequence[str]]
TESTS = ("[[", "[", "test")
JOINTS = ("&&", "||")
_CLOSING = {"[[": "]]", "[": "]"}
_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


@dataclass
class _Choice:
    """An ``if`` or ``case`` whose end has not been read.

    text     as it is written, for a message
    subject  the value of a ``case``; None if it is not known
    taken    whether a branch before the present one runs
    runs     whether the present branch runs
    """

    text: str
    subject: str | None = None
    taken: bool | None = False
    runs: bool | None = False

    def branch(self, condition: bool | None) -> None:
        """Begins the next branch."""
        self.runs = _all([_not(self.taken), condition])
        self.taken = _any([self.taken, condition])


@dataclass
class Branches:
    """The open choices at one place of a script, the outermost first."""

    choices: list[_Choice] = field(default_factory=list)

    @property
    def runs(self) -> bool | None:
        """Whether the statement at this place runs; None if that is not known."""
        return _all([choice.runs for choice in self.choices])

    @property
    def unknown(self) -> list[str]:
        """The choices that leave open whether the statement at this place runs."""
        return [choice.text for choice in self.choices if choice.runs is None] if self.runs is None else []

    def read(self, tokens: Sequence[str], at: int, variables: Variables) -> int:
        """Reads the keyword of an ``if`` or ``case`` at the beginning of a statement. Returns the position after it and
        its condition or pattern; ``at`` if there is none."""
        word = tokens[at]
        if word in ("if", "elif") and (then := _then(tokens, at)):
            condition = tokens[at + 1 : then]
            if word == "if":
                self.choices.append(_Choice(_written([word, *condition])))
            if self.choices:
                self.choices[-1].branch(truth(condition, variables))
            return then + 1
        if word == "case" and tokens[at + 2 : at + 3] == ["in"]:
            self.choices.append(_Choice(_written(tokens[at : at + 3]), _text(tokens[at + 1], variables)))
            return self._pattern(tokens, at + 3, variables)
        if word == "else" and self.choices:
            self.choices[-1].branch(True)
            return at + 1
        if word == ";;" and self.choices:
            return self._pattern(tokens, at + 1, variables)
        if word in ("fi", "esac") and self.choices:
            self.choices.pop()
            return at + 1
        return at

    def _pattern(self, tokens: Sequence[str], at: int, variables: Variables) -> int:
        """Begins the branch of a ``case`` whose pattern is at this position. Returns the position after the pattern."""
        while at < len(tokens) and tokens[at] in ("\n", "("):
            at += 1
        if at == len(tokens) or tokens[at] == "esac" or ")" not in tokens[at:]:
            return at
        end = tokens.index(")", at)
        patterns = [_text(token, variables) for token in tokens[at:end] if token != "|"]
        subject = self.choices[-1].subject
        self.choices[-1].branch(_any([_matches(subject, pattern) for pattern in patterns]))
        return end + 1


def _then(tokens: Sequence[str], at: int) -> int:
    """The position of the ``then`` that ends a condition; 0 if this is not a condition of the shell."""
    for place in range(at + 1, len(tokens)):
        if tokens[place] == "then" and tokens[place - 1] in (";", "\n"):
            return place
        if tokens[place] == "\n" and tokens[place - 1] not in JOINTS and tokens[place + 1 : place + 2] != ["then"]:
            return 0
    return 0


def truth(tokens: Sequence[str], variables: Variables) -> bool | None:
    """Whether the commands of a condition succeed; None if that is not known without running them."""
    value: bool | None = None
    joint = ";"
    for command, following in _commands(tokens):
        if not command:
            continue
        succeeds = _succeeds(command, variables)
        if joint in JOINTS:
            succeeds = _all([value, succeeds]) if joint == "&&" else _any([value, succeeds])
        value = succeeds
        joint = following
    return value


def _commands(tokens: Sequence[str]) -> Iterator[tuple[list[str], str]]:
    """The commands of a list, each with what comes after it, such as ``&&``."""
    command: list[str] = []
    for token in tokens:
        if token in (";", "\n", "&", "|", *JOINTS) and not is_open_test(command):
            yield command, token
            command = []
        else:
            command.append(token)
    yield command, ";"


def is_open_test(command: Sequence[str]) -> bool:
    """Whether the words begin a ``[[ ]]`` that does not end in them: ``&&`` is then a part of it."""
    return "[[" in command[:2] and "]]" not in command


def _succeeds(command: Sequence[str], variables: Variables) -> bool | None:
    name = command[0]
    words = list(command[1:])
    if name == "!" and words:
        return _not(_succeeds(words, variables))
    if name in _CLOSING and words[-1:] == [_CLOSING[name]]:
        return _test(words[:-1], variables, patterns=name == "[[")
    if name == "test":
        return _test(words, variables, patterns=False)
    return {"true": True, ":": True, "false": False}.get(name)


def _test(words: list[str], variables: Variables, patterns: bool) -> bool | None:
    for several, joints in ((_any, ("||", "-o")), (_all, ("&&", "-a"))):
        at = next((at for at, word in enumerate(words) if word in joints), None)
        if at is not None:
            parts = (words[:at], words[at + 1 :])
            return several([_test(part, variables, patterns) for part in parts])
    if words[:1] == ["!"]:
        return _not(_test(words[1:], variables, patterns))
    if len(words) == 2 and words[0] in ("-z", "-n"):
        text = _text(words[1], variables)
        return None if text is None else (text == "") == (words[0] == "-z")
    if len(words) == 1:
        text = _text(words[0], variables)
        return None if text is None else text != ""
    return _compared(words, variables, patterns) if len(words) == 3 else None


def _compared(words: Sequence[str], variables: Variables, patterns: bool) -> bool | None:
    left = _text(words[0], variables)
    right = _text(words[2], variables)
    if left is None or right is None:
        return None
    if words[1] in _NUMBERS:
        numbers = [int(text) for text in (left, right) if text.lstrip("-").isdecimal()]
        return _NUMBERS[words[1]](*numbers) if len(numbers) == 2 else None
    if words[1] in ("=", "==", "!="):
        equal = fnmatchcase(left, right) if patterns else left == right
        return equal == (words[1] != "!=")
    return None


def _text(token: str, variables: Variables) -> str | None:
    """The token with the values of its variables; None if one of them is not known."""
    text = " ".join(expanded(token, variables))
    return None if "$" in text or "`" in text else text


def _matches(subject: str | None, pattern: str | None) -> bool | None:
    if pattern == "*":
        return True
    return None if subject is None or pattern is None else fnmatchcase(subject, pattern)


def _written(tokens: Sequence[str]) -> str:
    return " ".join(token for token in tokens if token not in (";", "\n"))


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _all(values: Sequence[bool | None]) -> bool | None:
    if False in values:
        return False
    return None if None in values else True


def _any(values: Sequence[bool | None]) -> bool | None:
    return _not(_all([_not(value) for value in values]))

"""Finds the training command in a shell script without running the script.

Variables, arrays and sourced files are read as a shell would read them. Commands are not run, and conditions and loops
are ignored: both branches of an `if` count, and the later branch wins. An unknown variable is left as it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_pp.plan.costs.files import read_text
from megatron_pp.tools.check.jobs.errors import UnreadableError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)\Z", re.DOTALL)
_USED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_COMMENT = re.compile(r"(^|\s)#.*")
PRINTED = "WHAT_A_COMMAND_PRINTS"
_ENDS = {";", "\n", "&", "|", "&&", "||"}
_SWIFT = ("sft", "pt", "rlhf", "pretrain")


@dataclass
class Command:
    """A training command: its program, its script or module, the words after the script, whether ``script`` is a
    module,
    the variables that are set for it, and the words of the launcher before it."""

    program: str
    script: str
    words: list[str]
    module: bool = False
    variables: dict[str, list[str]] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)


def read_shell(path: str) -> Command:
    """The training command of a shell script. If it has several, the longest. Raises UnreadableError if it has none."""
    variables: dict[str, list[str]] = {}
    commands = [found for words in _statements(Path(path), variables) if (found := _command(words))]
    if not commands:
        known = "a Python script with flags such as --num-layers 32, `megatron sft`, or `-m verl.trainer...`"
        raise UnreadableError(f"{path} has no training command that check knows: {known}")
    command = max(commands, key=lambda one: len(one.words))
    command.variables = {**variables, **command.variables}
    return command


def _statements(path: Path, variables: dict[str, list[str]], depth: int = 0) -> Iterator[list[str]]:
    """The expanded words of each command."""
    tokens = _tokens(path)
    statement: list[str] = []
    at = 0
    while at <= len(tokens):
        token = tokens[at] if at < len(tokens) else "\n"
        at += 1
        assigned = _ASSIGNED.fullmatch(token)
        if assigned and not assigned[3] and at < len(tokens) and tokens[at] == "(":
            words, at = _array(tokens, at + 1)
            words = [each for word in words for each in expanded(word, variables)]
            variables[assigned[1]] = [*(variables.get(assigned[1], []) if assigned[2] else []), *words]
        elif token in _ENDS:
            words = _without_assignments(statement, variables)
            if words[:1] in (["source"], ["."]) and len(words) > 1 and depth < 5:
                yield from _sourced(path, " ".join(words[1:]), variables, depth)
            elif words:
                yield words
            statement = []
        else:
            statement.append(token)


def _tokens(path: Path) -> list[str]:
    lines = [line if "'" in line or '"' in line else _COMMENT.sub("", line) for line in read_text(path).split("\n")]
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    text = _without_substitutions(re.sub(r"\\\n", " ", "\n".join(line.rstrip() for line in lines)))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|\n")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    try:
        found = list(lexer)
    except ValueError as error:
        raise UnreadableError(f"{path} cannot be read as a shell script: {error}") from None
    return [part for token in found for part in _apart(token)]


def _without_substitutions(text: str) -> str:
    """The text with each ``$(...)``, also with quotes in it, replaced by an unknown variable."""
    found, at = "", 0
    while (begin := text.find("$(", at)) >= 0:
        end, depth = begin + 2, 1
        while end < len(text) and depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        found += f"{text[at:begin]}${{{PRINTED}}}"
        at = end
    return found + text[at:]


def _apart(token: str) -> list[str]:
    """The single punctuation marks of a token: the lexer joins neighbours, such as ``)\\n\\n``."""
    return re.findall(r"&&|\|\||.|\n", token) if token and not token.strip("();&|\n") else [token]


def _array(tokens: list[str], at: int) -> tuple[list[str], int]:
    """The words of an array up to its closing parenthesis, and the position of the token after it."""
    words: list[str] = []
    depth = 1
    while at < len(tokens) and depth:
        token = tokens[at]
        at += 1
        depth += (token == "(") - (token == ")")
        if depth == 1 and token not in _ENDS and token not in "()" and PRINTED not in token:
            words.append(token)
    return words, at


def _without_assignments(statement: list[str], variables: dict[str, list[str]]) -> list[str]:
    """The expanded words of the command. ``NAME=value`` in front of them sets variables."""
    words = list(statement)
    if words[:1] in (["export"], ["declare"], ["local"], ["readonly"]):
        words.pop(0)
    while words and (assigned := _ASSIGNED.fullmatch(words[0])):
        words.pop(0)
        value = expanded(assigned[3], variables)
        variables[assigned[1]] = [*(variables.get(assigned[1], []) if assigned[2] else []), *value]
    return [each for word in words for each in expanded(word, variables)]


def expanded(word: str, variables: dict[str, list[str]]) -> list[str]:
    """The words that the shell would make of a word of the script. A word that is only a variable may become
    several."""
    whole = _USED.fullmatch(word)
    if whole is not None:
        name = whole[1] or whole[3]
        if name in variables:
            return [each for value in variables[name] for each in value.split()]
        return [whole[2].strip("\"'")] if whole[2] is not None else [word]

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return " ".join(variables[name]) if name in variables else (found[2] if found[2] is not None else found[0])

    replaced = _USED.sub(value, word)
    return replaced.split() if replaced != word and word.lstrip().startswith(("-", "$")) else [replaced]


def _sourced(path: Path, name: str, variables: dict[str, list[str]], depth: int) -> Iterator[list[str]]:
    """The statements of a sourced file. If its folder is a variable, the file is looked for beside this script."""
    relative = re.sub(r"\A\$\{?\w+\}?/|\A.*\$\(.*\)/", "", name)
    for place in (Path(name), path.parent / relative, path.parent / Path(relative).name):
        if place.is_file():
            yield from _statements(place, variables, depth + 1)
            return


def _command(words: list[str]) -> Command | None:
    for at, word in enumerate(words):
        behind = words[at + 1 :]
        if word == "megatron" and behind[:1] and behind[0] in _SWIFT:
            return Command("ms-swift", "megatron", behind[1:], launcher=words[:at])
        if word == "-m" and behind and behind[0].startswith("verl."):
            return Command("verl", behind[0], behind[1:], launcher=words[:at])
        if word == "-m" and behind and "." in behind[0] and not behind[0].startswith("torch."):
            return Command("megatron", behind[0], behind[1:], module=True, launcher=words[:at])
        if word.endswith(".py"):
            if not any(one.startswith("--") for one in behind):
                continue
            slime = any(one.partition("=")[0] in ("--rollout-batch-size", "--actor-num-nodes") for one in behind)
            return Command("slime" if slime else "megatron", word, behind, launcher=words[:at])
    return None


def number_behind(words: list[str], *names: str) -> int | None:
    """The number that a launcher's command line gives one of these options; None if it does not."""
    for at, word in enumerate(words):
        name, equals, value = word.replace("_", "-").partition("=")
        text = value if equals else (words[at + 1] if at + 1 < len(words) else "")
        if name in names and text.isdigit():
            return int(text)
    return None

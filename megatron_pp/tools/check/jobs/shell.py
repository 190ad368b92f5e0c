"""Finds the training command in a shell script without running the script.

Variables, arrays, conditions and sourced files are read as a shell would read them. Commands are not run, and the body
of a loop is read once. An unknown variable is left as it is written. If a condition is not known, all of its branches
are read, and the later one wins.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron_pp.plan.costs.files import read_text
from megatron_pp.tools.check.jobs.conditions import JOINTS, TESTS, Branches, is_open_test, truth
from megatron_pp.tools.check.jobs.errors import UnreadableError
from megatron_pp.tools.check.jobs.shell_words import expanded

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)\Z", re.DOTALL)
PRINTED = "WHAT_A_COMMAND_PRINTS"
_ENDS = {";", ";;", "\n", "&", "|", *JOINTS}
_SHELLS = ("bash", "sh", "zsh")
_TAKES_COMMANDS = re.compile(r"-[a-z]*c")
_SWIFT = ("sft", "pt", "rlhf", "pretrain")


@dataclass
class Command:
    """A training command.

    words      the words after the script
    module     whether ``script`` is a module
    variables  the variables that are set for it
    launcher   the words of the launcher before it
    unknown    conditions of the shell script that are not known, and that decide about a variable
    """

    program: str
    script: str
    words: list[str]
    module: bool = False
    variables: dict[str, list[str]] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def read_shell(path: str) -> Command:
    """The training command of a shell script. If it has several, the longest. Raises UnreadableError if it has none."""
    seen = _Seen()
    commands = [found for words in _statements(Path(path), seen) if (found := _command(words))]
    if not commands:
        known = "a Python script with flags such as --num-layers 32, `megatron sft`, or `-m verl.trainer...`"
        raise UnreadableError(f"{path} has no training command that check knows: {known}")
    command = max(commands, key=lambda one: len(one.words))
    command.variables = {**seen.variables, **command.variables}
    command.unknown = list(dict.fromkeys(seen.unknown))
    return command


@dataclass
class _Seen:
    """The state after the statements that were read.

    joint     what is between the previous statement and this one, such as ``&&``
    before    whether the previous statement succeeded; None if that is not known
    tested    the previous statement, if it is a test
    """

    variables: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    branches: Branches = field(default_factory=Branches)
    joint: str = "\n"
    before: bool | None = None
    tested: str = ""

    @property
    def runs(self) -> bool:
        """Whether the present statement counts."""
        skipped = {"&&": self.before is False, "||": self.before is True}
        return self.branches.runs is not False and not skipped.get(self.joint, False)

    def assign(self, name: str, words: list[str], adds: bool) -> None:
        if not self.runs:
            return
        self.unknown += self.branches.unknown
        if self.joint in JOINTS and self.tested and self.before is None:
            self.unknown.append(self.tested)
        self.variables[name] = [*(self.variables.get(name, []) if adds else []), *words]

    def end(self, statement: list[str], joint: str) -> None:
        """Notes that a statement has ended."""
        if self.runs:
            tests = statement[:1] != [] and (statement[0] in TESTS or statement[0] == "!")
            self.before = truth(statement, self.variables) if tests else None
            self.tested = " ".join(statement) if tests else ""
        self.joint = joint


def _statements(path: Path, seen: _Seen, depth: int = 0) -> Iterator[list[str]]:
    """The expanded words of each command that runs, or that may run."""
    return _statements_of(read_text(path), path, seen, depth)


def _statements_of(text: str, path: Path, seen: _Seen, depth: int) -> Iterator[list[str]]:
    """The same for a text that the file at ``path`` contains."""
    tokens = _tokens(text, path)
    statement: list[str] = []
    at = 0
    while at <= len(tokens):
        token = tokens[at] if at < len(tokens) else "\n"
        if not statement and at < len(tokens):
            after = seen.branches.read(tokens, at, seen.variables)
            if after > at:
                at = after
                seen.joint = token
                continue
        at += 1
        assigned = _ASSIGNED.fullmatch(token)
        if assigned and not assigned[3] and at < len(tokens) and tokens[at] == "(":
            words, at = _array(tokens, at + 1)
            words = [each for word in words for each in expanded(word, seen.variables)]
            seen.assign(assigned[1], words, bool(assigned[2]))
        elif token in _ENDS and not is_open_test(statement):
            words = _without_assignments(statement, seen)
            runs = seen.runs
            seen.end(statement, token)
            if runs and words[:1] in (["source"], ["."]) and len(words) > 1 and depth < 5:
                yield from _sourced(path, " ".join(words[1:]), seen, depth)
            elif runs and (place := _place_of_text(words)) and depth < 5:
                yield from _statements_within(words, place, path, seen, depth)
                seen.joint = token
                seen.before = None  # whether a command succeeds is not known
            elif runs and words:
                yield words
            statement = []
        elif statement or token not in ("do", "{"):
            statement.append(token)


def _statements_within(words: list[str], place: int, path: Path, seen: _Seen, depth: int) -> Iterator[list[str]]:
    """The commands in the word at ``place``, each behind the words before it."""
    text = words[place].replace("\\$", "$")  # a variable that the inner shell replaces
    try:
        for inner in _statements_of(text, path, seen, depth + 1):
            yield [*words[:place], *inner]
    except UnreadableError:  # it is not a text of commands
        yield words


def _place_of_text(words: list[str]) -> int | None:
    """The place of the commands that a shell gets as one word, as in ``bash -c "torchrun train.py"``."""
    for at in range(2, len(words)):
        if _TAKES_COMMANDS.fullmatch(words[at - 1]) and Path(words[at - 2]).name in _SHELLS and " " in words[at]:
            return at
    return None


def _tokens(text: str, path: Path) -> list[str]:
    text = _without_substitutions(re.sub(r"\\\n", " ", _without_comments(text)))
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();&|\n")
    lexer.whitespace = " \t\r"
    lexer.commenters = ""
    lexer.whitespace_split = True
    try:
        found = list(lexer)
    except ValueError as error:
        raise UnreadableError(f"{path} cannot be read as a shell script: {error}") from None
    return [part for token in found for part in _apart(token)]


def _without_comments(text: str) -> str:
    """The text without comments and without spaces at the ends of lines. A # within quotes or within a word is kept."""
    found: list[str] = []
    quote = ""
    for line in text.split("\n"):
        end = len(line)
        at = 0
        while at < len(line):
            one = line[at]
            if one == "\\" and quote != "'":
                at += 1
            elif one in "\"'" and quote in ("", one):
                quote = "" if quote else one
            elif one == "#" and not quote and (at == 0 or line[at - 1] in " \t;&|("):
                end = at
                break
            at += 1
        if end == len(line) or line[:end].strip():  # a line that is only a comment does not end a command
            found.append(line[:end].rstrip())
    return "\n".join(found)


def _without_substitutions(text: str) -> str:
    """The text with each ``$(...)``, also with quotes in it, replaced by an unknown variable."""
    found = ""
    at = 0
    while (begin := text.find("$(", at)) >= 0:
        end = begin + 2
        depth = 1
        while end < len(text) and depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        found += f"{text[at:begin]}${{{PRINTED}}}"
        at = end
    return found + text[at:]


def _apart(token: str) -> list[str]:
    """The single punctuation marks of a token: the lexer joins neighbours, such as ``)\\n\\n``."""
    return re.findall(r"&&|\|\||;;|.|\n", token) if token and not token.strip("();&|\n") else [token]


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


def _without_assignments(statement: list[str], seen: _Seen) -> list[str]:
    """The expanded words of the command. ``NAME=value`` in front of them sets variables."""
    words = list(statement)
    if words[:1] in (["export"], ["declare"], ["local"], ["readonly"]):
        words.pop(0)
    while words and (assigned := _ASSIGNED.fullmatch(words[0])):
        words.pop(0)
        seen.assign(assigned[1], expanded(assigned[3], seen.variables), bool(assigned[2]))
    return [each for word in words for each in expanded(word, seen.variables)]


def _sourced(path: Path, name: str, seen: _Seen, depth: int) -> Iterator[list[str]]:
    """The statements of a sourced file. If its folder is a variable, the file is looked for beside this script."""
    relative = re.sub(r"\A\$\{?\w+\}?/|\A.*\$\(.*\)/", "", name)
    for place in (Path(name), path.parent / relative, path.parent / Path(relative).name):
        if place.is_file():
            yield from _statements(place, seen, depth + 1)
            return


def _command(words: list[str]) -> Command | None:
    for at, word in enumerate(words):
        behind = words[at + 1 :]
        if word == "megatron" and behind[:1] and behind[0] in _SWIFT:
            return Command("ms-swift", "megatron", behind[1:], launcher=words[:at])
        if word == "-m" and behind and behind[0].startswith("verl."):
            program = "verl-sft" if behind[0].endswith(".sft_trainer") else "verl"
            return Command(program, behind[0], behind[1:], launcher=words[:at])
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

"""The parser of the command line: every error is one line that says what would be right.

An option that was not given is None, False or an empty list, and means the library's own default. One that changes
nothing is a mistake, and refused.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megatron_pp import __version__
from megatron_pp.common.names import did_you_mean, unknown
from megatron_pp.errors import visible
from megatron_pp.tools.cli.errors import BAD_INPUT, UsageError
from megatron_pp.tools.cli.terminal import wrapped_command, wrapped_for

_INTRODUCTION = (
    "Pipeline-parallel training: check a job before it is launched, choose a pipeline, look at its plan, and compare "
    "with what really happened."
)
_LONG = 32  # characters of the choices of an option
# What argparse says of --switch=value.
_EXPLICIT = re.compile(r"argument ([^,/\s:]+)[^:]*: ignored explicit argument (.*)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Paragraphs are filled to the terminal. Indented lines are examples: they stay as they are, and one that is too
    long goes on after a backslash, so that it can be pasted. A remark behind an example begins with ``#``."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for paragraph in _paragraphs(text):
            if paragraph.startswith(" "):
                lines += _example(paragraph, width - len(indent))
            else:
                lines += self._split_lines(paragraph, width - len(indent)) or [""]
        return "\n".join((indent + line).rstrip() for line in lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Any:
        if action.metavar is None and action.choices is not None and _is_long(action.choices):
            return lambda size: (default_metavar,) * size
        return super()._metavar_formatter(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """With the choices where there are too many to be named beside the option."""
        text, choices = action.help, action.choices
        if not text or choices is None or action.metavar is not None or not _is_long(choices):
            return text
        return text if all(str(one) in text for one in choices) else f"{text}; one of {', '.join(map(str, choices))}"


def _is_long(choices: Iterable[Any]) -> bool:
    return sum(len(str(one)) + 1 for one in choices) > _LONG


def _paragraphs(text: str) -> list[str]:
    """Each as one line; a line that is indented is one of its own, with those that follow a backslash at its end."""
    found: list[str] = []
    ended = True
    for line in text.rstrip("\n").split("\n"):
        if found and found[-1].endswith("\\"):
            found[-1] = f"{found[-1][:-1].rstrip()} {line.strip()}"
        elif ended or not line or line.startswith(" "):
            found.append(line)
        else:
            found[-1] += f" {line}"
        ended = not line or line.startswith(" ") or line.endswith(":")
    return found


def _example(line: str, width: int) -> list[str]:
    command, gap, remark = line.partition("   # ")
    if len(line) <= width:
        return [line]
    lines = wrapped_command(command.rstrip(), width).split("\n")
    return [*lines, f"      # {remark.strip()}"] if gap else lines


class Parser(argparse.ArgumentParser):
    """Suggests the nearest name where one is not known, and reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        switch = _EXPLICIT.fullmatch(message)
        if switch is not None:
            name = switch[1]
            message = f"{name} is a switch, true or false, and takes no value ({switch[2]}): write {name}"
            if (opposite := f"--no-{name.removeprefix('--')}") in self.options:
                message += f" or {opposite}"
        self.exit(BAD_INPUT, wrapped_for(sys.stderr, f"{self.prog}: {visible(message)}; see {self.prog} --help") + "\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown(action.dest.replace("_", " "), value, action.choices))

    @property
    def spelling(self) -> dict[str, str]:
        """Name of an option's value -> how the option is written."""
        return {action.dest: max(action.option_strings, key=len) for action in self._actions if action.option_strings}

    @property
    def options(self) -> list[str]:
        """All, in each spelling."""
        return [text for action in self._actions for text in action.option_strings]


def parse(
    commands: Mapping[str, Any],
    argv: Sequence[str] | None,
    listed: Mapping[str, str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> argparse.Namespace:
    """The arguments, for ``commands``: name -> module with SUMMARY, EXAMPLES, add_arguments and run. ``listed``: name
    -> summary of those that read their arguments themselves. ``groups``: title in the help -> names. Exits where they
    are not understood.
    """
    usage = "%(prog)s [-h] [--version] COMMAND ..."
    parser = Parser(prog="megatron-pp", description=_INTRODUCTION, usage=usage)
    parser.add_argument("--version", action="version", version=f"megatron-pp {__version__}")
    # What argparse says of a command that is not known begins with the parser's prog.
    chosen = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", prog="megatron-pp")
    parsers = {name: _add_command(chosen, name, module) for name, module in commands.items()}
    for name, summary in (listed or {}).items():
        chosen.add_parser(name, help=summary)
    _group(parser, chosen, groups or {})
    args, rest = parser.parse_known_args(argv)
    if rest:
        parsers[args.command].error(_not_understood(rest[0], args.command, parsers))
    return args


def _group(parser: Parser, chosen: Any, groups: Mapping[str, Sequence[str]]) -> None:
    """List the commands under their titles, in their order; argparse has one list for all."""
    listed = {action.dest: action for action in chosen._choices_actions}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        group._group_actions += [listed.pop(name) for name in names if name in listed]
    chosen._choices_actions[:] = listed.values()
    if not listed:
        chosen.help = argparse.SUPPRESS


def _add_command(chosen: Any, name: str, module: Any) -> Parser:
    parser: Parser = chosen.add_parser(
        name,
        help=module.SUMMARY,
        description=module.SUMMARY[0].upper() + module.SUMMARY[1:] + ".",
        epilog=module.EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--no-colour", "--no-color", action="store_true", help="no colours, also on a terminal")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run, spelling=parser.spelling)
    return parser


def _not_understood(text: str, command: str, parsers: Mapping[str, Parser]) -> str:
    """The error for an argument that ``command`` does not have."""
    name = text.partition("=")[0]
    if not name.startswith("-"):
        return f"{text!r} is one argument too many"
    options = {command: parser.spelling.values() for command, parser in parsers.items()}
    others = [other for other, known in options.items() if name in known]
    if others:
        return f"{name} is an option of {' and '.join(others)}, not of {command}"
    return f"option {name} is not known{did_you_mean(name, options[command])}"


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of ``names`` that were given, with their values."""
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != []}


def option(args: argparse.Namespace, name: str) -> str:
    """How the option is written."""
    return str(args.spelling[name])


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raises UsageError for the first of ``names`` that was given, whatever its value; ``why`` ends the sentence."""
    for name in given(args, names):
        raise UsageError(f"{option(args, name)} {why}")

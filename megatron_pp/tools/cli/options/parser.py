"""The parser of the command line. Every error is one line that says what would be right.

An option that was not given is None, False or an empty list; the library's default then applies. An option that has no
effect is a mistake and refused.
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
    "Pipeline-parallel training: check a job before it is launched, choose a pipeline, see its plan, and compare the "
    "plan with a traced run."
)
_PATHS = ("FILE", "FOLDER")
_LONG = 32  # longest list of choices, in characters, that is shown beside an option
# argparse's error for --switch=value.
_EXPLICIT = re.compile(r"argument ([^,/\s:]+)[^:]*: ignored explicit argument (.*)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the width of the terminal. Indented lines are examples and are not filled. An example that is
    too long is continued after a backslash, so that it can be pasted. A remark after an example begins with ``#``."""

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
        """The help text; with the choices, if there are too many to be shown beside the option."""
        text = action.help
        choices = action.choices
        if not text or choices is None or action.metavar is not None or not _is_long(choices):
            return text
        return text if all(str(one) in text for one in choices) else f"{text}; one of {', '.join(map(str, choices))}"


def _is_long(choices: Iterable[Any]) -> bool:
    return sum(len(str(one)) + 1 for one in choices) > _LONG


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, each as one line. An indented line is a paragraph; if it ends with a backslash, the
    next line belongs to it."""
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
    """Reports an error in one line, and suggests the nearest name for an unknown one."""

    def error(self, message: str) -> NoReturn:
        switch = _EXPLICIT.fullmatch(message)
        if switch is not None:
            name = switch[1]
            message = f"{name} is a switch, true or false, and takes no value ({switch[2]}): write {name}"
            if (opposite := f"--no-{name.removeprefix('--')}") in self.options:
                message += f" or {opposite}"
        self.exit(BAD_INPUT, wrapped_for(sys.stderr, f"{self.prog}: {visible(message)}; see {self.prog} --help") + "\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if value == "" and action.metavar in _PATHS:  # as of -o "$FILE", if the variable is not set
            raise argparse.ArgumentError(action, f"'' is not the name of a {str(action.metavar).lower()}")
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown(action.dest.replace("_", " "), value, action.choices))

    @property
    def spelling(self) -> dict[str, str]:
        """Name of an option's value -> the option as the user writes it."""
        return {action.dest: max(action.option_strings, key=len) for action in self._actions if action.option_strings}

    @property
    def options(self) -> list[str]:
        """All options, in each spelling."""
        return [text for action in self._actions for text in action.option_strings]


def parse(
    commands: Mapping[str, Any],
    argv: Sequence[str] | None,
    listed: Mapping[str, str] | None = None,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> argparse.Namespace:
    """The parsed arguments. Exits if they are not understood.

    commands  name -> module with SUMMARY, EXAMPLES, add_arguments and run
    listed    name -> summary of each command that parses its own arguments
    groups    title in the help -> names of commands
    """
    usage = "%(prog)s [-h] [--version] COMMAND ..."
    parser = Parser(prog="megatron-pp", description=_INTRODUCTION, usage=usage)
    parser.add_argument("--version", action="version", version=f"megatron-pp {__version__}")
    # argparse's error for an unknown command begins with the parser's prog.
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
    """Lists the commands under their titles, in this order. argparse itself has one list for all."""
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
    """The given options among ``names``, with their values."""
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False and value != []}


def option(args: argparse.Namespace, name: str) -> str:
    """The option as the user writes it."""
    return str(args.spelling[name])


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raises UsageError for the first of ``names`` that was given. Its message is the option followed by ``why``."""
    for name in given(args, names):
        raise UsageError(f"{option(args, name)} {why}")

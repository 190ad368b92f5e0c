"""The ``megatron-pp`` command: look at plans before they run, and at runs afterwards."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from megatron_pp import __version__
from megatron_pp.cli.errors import BAD_INPUT, REFUSED, RefusedError
from megatron_pp.errors import MegatronPPError

_INTRODUCTION = (
    "Plans of pipeline-parallel training: print, check, simulate, draw, and compare with what really happened."
)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(commands: dict[str, Any]) -> argparse.ArgumentParser:
    """The parser of ``commands``: name -> module with SUMMARY, EXAMPLES, add_arguments and run."""
    parser = _Parser(prog="megatron-pp", description=_INTRODUCTION)
    parser.add_argument("--version", action="version", version=f"megatron-pp {__version__}")
    chosen = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in commands.items():
        one = chosen.add_parser(
            name,
            help=module.SUMMARY,
            description=module.SUMMARY[0].upper() + module.SUMMARY[1:] + ".",
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument("--no-colour", "--no-color", action="store_true", help="plain text on a terminal too")
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 done, 1 the answer is no, 2 wrong arguments or files."""
    try:
        from megatron_pp.cli.terminal import Terminal, print_line
    except ImportError:
        print("megatron-pp needs the package 'rich' for its tables: pip install 'megatron-pp[viz]'", file=sys.stderr)
        return 2
    from megatron_pp.cli import draw, plan, report, simulate, verify

    commands = {"plan": plan, "verify": verify, "simulate": simulate, "draw": draw, "report": report}
    args = build_parser(commands).parse_args(argv)
    no_colour = args.no_colour or None  # None: as the environment says (NO_COLOR)
    args.console_errors = Terminal(stderr=True, no_color=no_colour)
    try:
        code = int(args.run(args, Terminal(no_color=no_colour)))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        problem, code = f"the answer cannot be written ({error.strerror or error})", BAD_INPUT
    except RefusedError as error:
        problem, code = str(error), REFUSED
    except (MegatronPPError, ImportError) as error:
        problem, code = str(error), BAD_INPUT
    print_line(args.console_errors, f"megatron-pp {args.command}: {problem}")
    return code


def _drop_output() -> None:
    """What is still in the buffer goes nowhere: the interpreter's own flush at its end would fail as well."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The ``megatron-pp`` command: look at plans before they run, and at runs afterwards.

It needs neither torch nor a process group.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from megatron_pp import __version__

_INTRODUCTION = (
    "Plans of pipeline-parallel training: print, check, simulate, draw, and compare with what really happened."
)


def build_parser(commands: dict[str, Any]) -> argparse.ArgumentParser:
    """The parser of ``commands``: name -> module with SUMMARY, EXAMPLES, add_arguments and run."""
    parser = argparse.ArgumentParser(prog="megatron-pp", description=_INTRODUCTION)
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
        from rich.console import Console
    except ImportError:
        print("megatron-pp needs the package 'rich' for its tables: pip install 'megatron-pp[viz]'", file=sys.stderr)
        return 2
    from megatron_pp.commands import draw, plan, report, simulate, verify
    from megatron_pp.commands.errors import BAD_INPUT, REFUSED, RefusedError, UsageError
    from megatron_pp.plan.instruction import InstructionError
    from megatron_pp.plan.spec import PlanError

    commands = {"plan": plan, "verify": verify, "simulate": simulate, "draw": draw, "report": report}
    args = build_parser(commands).parse_args(argv)
    errors = Console(stderr=True, no_color=args.no_colour)
    args.console_errors = errors
    try:
        return int(args.run(args, Console(no_color=args.no_colour)))
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    except RefusedError as error:
        return _say(errors, args.command, error, REFUSED)
    except (UsageError, PlanError, InstructionError, ImportError) as error:
        return _say(errors, args.command, error, BAD_INPUT)


def _say(errors: Any, command: str, problem: Exception, code: int) -> int:
    """One line on what is wrong; returns ``code``."""
    errors.print(f"megatron-pp {command}: {problem}", markup=False, highlight=False, soft_wrap=True)
    return code
